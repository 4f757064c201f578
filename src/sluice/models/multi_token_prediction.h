// SPDX-License-Identifier: Apache-2.0
// Multi-token prediction (Gloeckle et al. 2024) as the Qwen families have it: one more block, which from what the
// decoder has of a token and the next token predicts the token after that. Embedding and head are the decoder's.
#pragma once

#include <memory>

#include "sluice/layers/norms.h"
#include "sluice/models/decoder.h"

namespace sluice {

// What enters the block: from the embedding e [T, D] of each next token, and what the decoder has of each token.
class MtpInput : public Module {
 public:
  virtual Tensor forward(const Tensor& e, const Tensor& h) const = 0;  // to the block's residual [T, R]
  virtual bool reads_residual() const = 0;  // h is the decoder's residual [T, R]; otherwise its hidden states [T, D]
  virtual double operations(double tokens) const = 0;
};

// fc [ norm(e) | norm(h) ] of hidden states: Qwen3-Next and Qwen3.5.
class JoinedInput : public MtpInput {
 public:
  JoinedInput(std::int64_t hidden_size, double rms_norm_eps, double initializer_range);
  Tensor forward(const Tensor& e, const Tensor& h) const override;
  bool reads_residual() const override { return false; }
  double operations(double tokens) const override { return fc_.operations(tokens); }

 private:
  ZeroCenteredRmsNorm &pre_fc_norm_embedding_, &pre_fc_norm_hidden_;
  Linear& fc_;  // [D, 2 D]
};

// fc_embedding(norm(e)) + fc_hidden(norm(h) of stream s) for each stream s of the residual, with one norm over all of
// the streams together: Qwen3.8-Flash-Next.
class StreamsInput : public MtpInput {
 public:
  StreamsInput(std::int64_t hidden_size, std::int64_t streams, double rms_norm_eps, double initializer_range);
  Tensor forward(const Tensor& e, const Tensor& h) const override;
  bool reads_residual() const override { return true; }
  double operations(double tokens) const override;

 private:
  std::int64_t streams_;
  ZeroCenteredRmsNorm &pre_fc_norm_embedding_, &pre_fc_norm_hidden_;  // [D], [streams D]
  Linear &fc_embedding_, &fc_hidden_;                                 // [D, D] each
};

struct MultiTokenPredictionParts {
  std::unique_ptr<MtpInput> input;
  BlockParts block;
  Named<Residual> output;  // what the head reads
};

// input, block, output. Named as under "mtp." on disk.
class MultiTokenPrediction : public Module {
 public:
  explicit MultiTokenPrediction(MultiTokenPredictionParts parts);

  // h as decoder.forward() gave it for the pack (reads_residual()); next_tokens [T] int64, any id at the end of a
  // sequence, where there is no next token: nothing before it depends on it. Gives the hidden states [T, D] of the
  // tokens after the next, for the decoder's head. A rank of a mesh gives and gets the rows of its own tokens; the ids
  // are of all.
  Tensor forward(const Decoder& decoder, const Tensor& h, const Tensor& next_tokens, const Pack& pack) const;
  bool reads_residual() const { return input_.reads_residual(); }

  // Of a forward pass over sequences of these lengths, without the head.
  Operations forward_operations(std::span<const std::int64_t> lengths) const;

 private:
  MtpInput& input_;
  Block& block_;
  Residual& output_;
};

}  // namespace sluice
