// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/linear.h"

#include "sluice/layers/lora.h"

namespace sluice {

Linear::Linear(std::int64_t out_features, std::int64_t in_features, double initializer_range)
    : weight_(declare({.name = "weight",
                       .shape = {out_features, in_features},
                       .adaptable = true,
                       .init = Init::normal(initializer_range)})) {}

Tensor Linear::forward(const Tensor& x) const {
  const auto project = [](const Tensor& input, const Tensor& weight) { return at::linear(input, weight); };
  const auto y = project(x, weight_.value);
  return weight_.adapter ? weight_.adapter->add_to(y, x, project, project) : y;
}

Embedding::Embedding(std::int64_t vocab_size, std::int64_t hidden_size, double initializer_range)
    : weight_(
          declare({.name = "weight", .shape = {vocab_size, hidden_size}, .init = Init::normal(initializer_range)})) {}

Tensor Embedding::forward(const Tensor& tokens) const { return at::embedding(weight_.value, tokens); }

}  // namespace sluice
