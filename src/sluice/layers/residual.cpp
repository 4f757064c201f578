// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/residual.h"

#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {

PreNorm::PreNorm(std::int64_t hidden_size, double eps)
    : weight_(declare({.name = "weight", .shape = {hidden_size}, .decay = false, .init = Init::constant(0)})),
      eps_(eps) {}

Tensor PreNorm::read(const Tensor& residual) const {
  return rms_norm(residual, weight_.value, eps_, /*zero_centered=*/true);
}

Tensor PreNorm::around(const Tensor& residual, const Part& part) const { return residual + part(read(residual)); }

}  // namespace sluice
