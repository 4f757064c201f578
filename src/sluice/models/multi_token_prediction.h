// SPDX-License-Identifier: Apache-2.0
// Multi-token prediction (Gloeckle et al. 2024) as Qwen3-Next and Qwen3.5 have it: one more block, which from a token's
// hidden state and the next token predicts the token after that. Embedding and head are the decoder's.
#pragma once

#include <memory>

#include "sluice/layers/norms.h"
#include "sluice/models/decoder.h"

namespace sluice {

struct MultiTokenPredictionParts {
  std::int64_t hidden_size;
  double initializer_range;
  std::unique_ptr<ZeroCenteredRmsNorm> embedding_norm, hidden_norm, final_norm;
  BlockParts block;
};

// h' = fc [ norm(embedding of the next token) | norm(h) ], then the block and a norm. Named as under "mtp." on disk.
class MultiTokenPrediction : public Module {
 public:
  explicit MultiTokenPrediction(MultiTokenPredictionParts parts);

  // hidden [T, D] as decoder.forward() gave it for the pack; next_tokens [T] int64, any id at the end of a sequence,
  // where there is no next token: nothing before it depends on it. Gives the hidden states [T, D] of the tokens after
  // the next, for the decoder's head.
  Tensor forward(const Decoder& decoder, const Tensor& hidden, const Tensor& next_tokens, const Pack& pack) const;

  // Of a forward pass over sequences of these lengths, without the head.
  Operations forward_operations(std::span<const std::int64_t> lengths) const;

 private:
  ZeroCenteredRmsNorm &pre_fc_norm_embedding_, &pre_fc_norm_hidden_;
  Linear& fc_;  // [D, 2 D]
  Block& block_;
  ZeroCenteredRmsNorm& norm_;
};

}  // namespace sluice
