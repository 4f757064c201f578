// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/norms.h"

#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {

ZeroCenteredRmsNorm::ZeroCenteredRmsNorm(std::int64_t size, double eps)
    : weight_(declare({.name = "weight", .shape = {size}, .decay = false, .init = Init::constant(0)})), eps_(eps) {}

Tensor ZeroCenteredRmsNorm::forward(const Tensor& x) const {
  return rms_norm(x, weight_.value, eps_, /*zero_centered=*/true);
}

GatedRmsNorm::GatedRmsNorm(std::int64_t head_dim, double eps, GateActivation activation)
    : weight_(declare({.name = "weight", .shape = {head_dim}, .decay = false, .init = Init::constant(1)})),
      eps_(eps),
      activation_(activation) {}

Tensor GatedRmsNorm::forward(const Tensor& x, const Tensor& gate) const {
  return gated_rms_norm(x, gate, weight_.value, eps_, activation_);
}

}  // namespace sluice
