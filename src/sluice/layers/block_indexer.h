// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "sluice/layers/linear.h"
#include "sluice/layers/mixer.h"
#include "sluice/layers/norms.h"

namespace sluice {

struct BlockIndexerSizes {
  std::int64_t hidden_size;
  std::int64_t num_heads, head_dim;
  std::int64_t block_size, budget;  // keys of a block; keys in blocks that a query may attend to, a multiple
  double rotary_theta;
  std::int64_t rotary_dim;  // the first `rotary_dim` of each head turn, as in the attention
  double rms_norm_eps;
  double initializer_range;
};

// Chooses the blocks of keys that each query of an attention layer attends to (Qwen3.8-Flash-Next's indexer). Each
// token has an index key; the keys of a block are averaged, normed and turned by the position of its first token, and
// scored by a few index queries (kernels/block_top_k). Only the choice leaves it, so its parameters get no gradient:
// they are frozen. c block size, nI heads, dI head dim.
class BlockIndexer : public Module {
 public:
  explicit BlockIndexer(const BlockIndexerSizes& sizes);

  // The blocks [T, budget / c] of each token of this context rank's piece, or none where no sequence of the pack is
  // past the budget yet: then every query attends to all that it sees. x [T, D] is the attention's input. With a state
  // of new_state(), each sequence continues its slot.
  std::optional<Tensor> choose(const Tensor& x, const ForwardContext& context, MixerState* state) const;
  std::unique_ptr<MixerState> new_state(std::int64_t slots, std::int64_t capacity,
                                        const at::TensorOptions& activations) const;
  std::int64_t block_size() const { return sizes_.block_size; }

  // How many keys the tokens of one sequence attend to, all together.
  double attended(std::int64_t length) const;
  void count_operations(std::span<const std::int64_t> lengths, Operations& operations) const;

 private:
  BlockIndexerSizes sizes_;
  Linear& index_qk_proj_;  // [(nI + 1) dI, D]: the query heads, then the key
  ZeroCenteredRmsNorm &q_layernorm_, &k_layernorm_;
};

}  // namespace sluice
