// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/linear.h"

#include "sluice/kernels/common/matmul.h"
#include "sluice/layers/lora.h"

namespace sluice {

Linear::Linear(std::int64_t out_features, std::int64_t in_features, double initializer_range, Split split)
    : weight_(declare({.name = "weight",
                       .shape = {out_features, in_features},
                       .adaptable = true,
                       .split = std::move(split),
                       .init = Init::normal(initializer_range)})) {}

Tensor Linear::forward(const Tensor& x) const { return adapted(times_weight(x, weight_.value), x); }

Tensor Linear::adapted(const Tensor& y, const Tensor& x) const {
  return weight_.adapter ? weight_.adapter->add_to(y, x, times_weight, times_weight) : y;
}

Embedding::Embedding(std::int64_t vocab_size, std::int64_t hidden_size, double initializer_range)
    : weight_(declare({.name = "weight",
                       .shape = {vocab_size, hidden_size},
                       .split = Split::anywhere(0),
                       .init = Init::normal(initializer_range)})) {}

Tensor Embedding::forward(const Tensor& tokens, const ForwardContext& context) const {
  const auto& tp = context.mesh.tp();
  const auto rows = tokens.narrow(0, context.split.context_first, context.split.context_count);
  if (tp.size() == 1) return at::embedding(weight_.value, rows);
  const auto place = rows - piece_begin(weight_.shape[0], tp.size(), tp.rank());
  const auto elsewhere = (place < 0).bitwise_or(place >= weight_.value.size(0));
  const auto found = at::embedding(weight_.value, place.masked_fill(elsewhere, 0));
  return scatter_tokens(found.masked_fill(elsewhere.unsqueeze(1), 0), context);
}

}  // namespace sluice
