// SPDX-License-Identifier: Apache-2.0
// The norms with their two conventions of weight: an offset around 0 (gain 1 + w), or a plain gain around 1.
#pragma once

#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"
#include "sluice/layers/parameter.h"

namespace sluice {

// Zero-centred RMSNorm over the last dim: x_hat (1 + w), w drawn as 0. Every layer, query, key and final norm of Qwen.
class ZeroCenteredRmsNorm : public Module {
 public:
  ZeroCenteredRmsNorm(std::int64_t size, double eps);
  Tensor forward(const Tensor& x) const;  // [..., size]

 private:
  Parameter& weight_;
  double eps_;
};

// Gated plain RMSNorm over each head: w x_hat a(gate), w drawn as 1; one weight for all heads.
class GatedRmsNorm : public Module {
 public:
  GatedRmsNorm(std::int64_t head_dim, double eps, GateActivation activation);
  Tensor forward(const Tensor& x, const Tensor& gate) const;  // [T, H, head_dim] both

 private:
  Parameter& weight_;
  double eps_;
  GateActivation activation_;
};

}  // namespace sluice
