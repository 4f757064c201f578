// SPDX-License-Identifier: Apache-2.0
// What the tests and benchmarks of operators share.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

// ||x - reference|| / ||reference|| in float64; NaN anywhere gives NaN, which passes no bound. The absolute norm where
// the reference is all zero.
inline double relative_error(const Tensor& x, const Tensor& reference) {
  const auto wide = reference.to(kDouble);
  const auto difference = (x.to(kDouble) - wide).norm().item<double>();
  const auto size = wide.norm().item<double>();
  return size > 0 ? difference / size : difference;
}

// cu_seqlens of sequences with the given lengths.
inline Tensor cu_seqlens_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> bounds{0};
  for (const auto length : lengths) bounds.push_back(bounds.back() + static_cast<std::int32_t>(length));
  return at::tensor(bounds, at::TensorOptions().dtype(kInt));
}

// A function of some inputs with several outputs, and the gradients of a fixed random weighting of its outputs.
struct Differentiated {
  std::vector<Tensor> outputs, gradients;  // gradients as the inputs; undefined where an input has none
};
using Operator = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

// `weights[i]` multiplies output i in the loss; an undefined one leaves the output out. An undefined input stays so.
inline Differentiated differentiate(const Operator& op, const std::vector<Tensor>& inputs,
                                    const std::vector<Tensor>& weights) {
  std::vector<Tensor> leaves;
  for (const auto& input : inputs) leaves.push_back(input.defined() ? input.detach().clone().requires_grad_() : input);
  Differentiated result{.outputs = op(leaves), .gradients = {}};
  Tensor loss = at::zeros({}, at::TensorOptions().dtype(kDouble));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].defined()) loss = loss + (result.outputs[i].to(kDouble) * weights[i].to(kDouble)).sum();
  }
  loss.backward();
  for (const auto& leaf : leaves) result.gradients.push_back(leaf.defined() ? leaf.grad() : Tensor());
  for (auto& output : result.outputs) output = output.detach();
  return result;
}

inline std::vector<Tensor> to_type(std::vector<Tensor> tensors, at::ScalarType type) {
  for (auto& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.to(type);
  }
  return tensors;
}

}  // namespace sluice
