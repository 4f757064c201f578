// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/multi_token_prediction.h"

#include <numeric>

namespace sluice {

JoinedInput::JoinedInput(std::int64_t hidden_size, double rms_norm_eps, double initializer_range)
    : pre_fc_norm_embedding_(
          add("pre_fc_norm_embedding", std::make_unique<ZeroCenteredRmsNorm>(hidden_size, rms_norm_eps))),
      pre_fc_norm_hidden_(add("pre_fc_norm_hidden", std::make_unique<ZeroCenteredRmsNorm>(hidden_size, rms_norm_eps))),
      fc_(add("fc", std::make_unique<Linear>(hidden_size, 2 * hidden_size, initializer_range))) {}

Tensor JoinedInput::forward(const Tensor& e, const Tensor& h) const {
  return fc_.forward(at::cat({pre_fc_norm_embedding_.forward(e), pre_fc_norm_hidden_.forward(h)}, 1));
}

StreamsInput::StreamsInput(std::int64_t hidden_size, std::int64_t streams, double rms_norm_eps,
                           double initializer_range)
    : streams_(streams),
      pre_fc_norm_embedding_(
          add("pre_fc_norm_embedding", std::make_unique<ZeroCenteredRmsNorm>(hidden_size, rms_norm_eps))),
      pre_fc_norm_hidden_(
          add("pre_fc_norm_hidden", std::make_unique<ZeroCenteredRmsNorm>(streams * hidden_size, rms_norm_eps))),
      fc_embedding_(add("fc_embedding", std::make_unique<Linear>(hidden_size, hidden_size, initializer_range))),
      fc_hidden_(add("fc_hidden", std::make_unique<Linear>(hidden_size, hidden_size, initializer_range))) {}

Tensor StreamsInput::forward(const Tensor& e, const Tensor& h) const {
  const auto embedding = fc_embedding_.forward(pre_fc_norm_embedding_.forward(e));                       // [T, D]
  const auto streams = fc_hidden_.forward(pre_fc_norm_hidden_.forward(h).unflatten(1, {streams_, -1}));  // [T, n, D]
  return (embedding.unsqueeze(1) + streams).flatten(1);
}

double StreamsInput::operations(double tokens) const {
  return fc_embedding_.operations(tokens) + static_cast<double>(streams_) * fc_hidden_.operations(tokens);
}

MultiTokenPrediction::MultiTokenPrediction(MultiTokenPredictionParts parts)
    : input_(add("mtp", std::move(parts.input))),
      block_(add("mtp.layers.0", std::make_unique<Block>(std::move(parts.block)))),
      output_(add("mtp." + parts.output.name, std::move(parts.output.part))) {}

Tensor MultiTokenPrediction::forward(const Decoder& decoder, const Tensor& h, const Tensor& next_tokens,
                                     const Pack& pack) const {
  const auto context = decoder.context(next_tokens, pack);
  const auto x = input_.forward(decoder.embed(context), h);
  return output_.read(block_.forward(x, context, /*state=*/nullptr));
}

Operations MultiTokenPrediction::forward_operations(std::span<const std::int64_t> lengths) const {
  Operations operations;
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  operations["multi-token prediction, projection"] = input_.operations(tokens);
  block_.count_operations(lengths, operations);
  output_.count_operations(tokens, operations);
  return operations;
}

}  // namespace sluice
