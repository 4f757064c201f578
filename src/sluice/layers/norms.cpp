// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/norms.h"

#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {

ZeroCenteredRmsNorm::ZeroCenteredRmsNorm(std::int64_t size, double eps)
    : weight_(declare({.name = "weight", .shape = {size}, .decay = false, .init = Init::constant(0)})), eps_(eps) {}

Tensor ZeroCenteredRmsNorm::forward(const Tensor& x) const {
  return rms_norm(x, weight_.value, eps_, /*zero_centered=*/true);
}

}  // namespace sluice
