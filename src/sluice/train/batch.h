// SPDX-License-Identifier: Apache-2.0
// A packed batch of data/ as tensors.
#pragma once

#include "sluice/data/packing.h"
#include "sluice/layers/pack.h"

namespace sluice {

struct Batch {
  Pack pack;
  Tensor tokens;       // [T] int64
  Tensor targets;      // [T] int64, -100 where nothing is asked
  Tensor loss_weight;  // [T] float32, 0 where nothing is asked
};

Batch to_batch(const PackedBatch& packed);

}  // namespace sluice
