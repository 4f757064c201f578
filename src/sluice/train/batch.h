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

// What multi-token prediction learns from the same pack: for each token the next one, at a sequence's end another one's
// first; and the target of that next token, where it is trained. `batch` is that of `packed`.
Batch next_tokens(const Batch& batch, const PackedBatch& packed);
double next_token_weight(const PackedBatch& packed);        // the sum of its loss weights
std::int64_t next_tokens_asked(const PackedBatch& packed);  // how many its targets are

}  // namespace sluice
