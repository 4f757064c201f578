// SPDX-License-Identifier: Apache-2.0
// A packed batch of data/ as tensors.
#pragma once

#include "sluice/data/packing.h"
#include "sluice/layers/pack.h"

namespace sluice {

// Pack and tokens are of all T tokens; what is asked is asked of the rank's own (layers/token_split.h).
struct Batch {
  Pack pack;
  Tensor tokens;  // [T] int64
  TokenSplit split;
  Tensor asked;                          // [A] int64, rising: those own tokens, by place, whose successor is trained;
                                         // then what fills up (filled_batch())
  Tensor targets;                        // [A] int64: that successor
  Tensor loss_weight;                    // [A] float32
  std::vector<std::int64_t> asked_rows;  // A of each tensor rank
};

Batch to_batch(const PackedBatch& packed, at::Device device, const Mesh& mesh = one_process());

// Sizes that a pack is filled up to, so that many packs have the same.
struct PackShape {
  std::int64_t tokens, sequences, asked;
  auto operator<=>(const PackShape&) const = default;
};

// The pack's own sizes rounded up: less than an eighth of tokens and asked is filling; sequences are a power of two.
PackShape filled_shape(const PackedBatch& packed);

// The pack with what fills it up: one more sequence, of its first tokens again, empty ones, and at the end asked rows
// of weight 0 whose target is ignored. The host knows the shape alone, so that what it does is the same for every pack
// of a shape: pack.lengths are bounds, of one sequence of all tokens. Gradients are those of the pack up to the
// rounding of matrix products of other heights. Of one process.
Batch filled_batch(PackedBatch packed, const PackShape& shape, at::Device device);

// What multi-token prediction learns from the same pack: for each token the next one, at a sequence's end another one's
// first; and the target of that next token, where it is trained. `batch` is that of `packed`.
Batch next_tokens(const Batch& batch, const PackedBatch& packed);
double next_token_weight(const PackedBatch& packed);        // the sum of its loss weights
std::int64_t next_tokens_asked(const PackedBatch& packed);  // how many its targets are

}  // namespace sluice
