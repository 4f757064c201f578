// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/multi_token_prediction.h"

#include <numeric>

namespace sluice {

MultiTokenPrediction::MultiTokenPrediction(MultiTokenPredictionParts parts)
    : pre_fc_norm_embedding_(add("mtp.pre_fc_norm_embedding", std::move(parts.embedding_norm))),
      pre_fc_norm_hidden_(add("mtp.pre_fc_norm_hidden", std::move(parts.hidden_norm))),
      fc_(add("mtp.fc", std::make_unique<Linear>(parts.hidden_size, 2 * parts.hidden_size, parts.initializer_range))),
      block_(add("mtp.layers.0", std::make_unique<Block>(std::move(parts.block)))),
      norm_(add("mtp.norm", std::move(parts.final_norm))) {}

Tensor MultiTokenPrediction::forward(const Decoder& decoder, const Tensor& hidden, const Tensor& next_tokens,
                                     const Pack& pack) const {
  const auto next = pre_fc_norm_embedding_.forward(decoder.embed(next_tokens));
  const auto joined = fc_.forward(at::cat({next, pre_fc_norm_hidden_.forward(hidden)}, 1));
  return norm_.forward(block_.forward(joined, {.pack = pack, .rotary = decoder.rotary(pack)}, /*state=*/nullptr));
}

Operations MultiTokenPrediction::forward_operations(std::span<const std::int64_t> lengths) const {
  Operations operations;
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  operations["multi-token prediction, projection"] = fc_.operations(tokens);
  block_.count_operations(lengths, operations);
  return operations;
}

}  // namespace sluice
