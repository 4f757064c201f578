// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace sluice
