// SPDX-License-Identifier: Apache-2.0
// A packed batch of data/ as tensors.
#pragma once

#include "sluice/data/packing.h"
#include "sluice/layers/pack.h"

namespace sluice {

struct Batch {
  Pack pack;
  Tensor tokens;       // [T] int64
  Tensor asked;        // [A] int64, rising: the tokens whose successor is trained
  Tensor targets;      // [A] int64: that successor
  Tensor loss_weight;  // [A] float32
};

Batch to_batch(const PackedBatch& packed, at::Device device);

}  // namespace sluice
