// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/grouped_rms_norm.h"

#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {

GroupedRmsNorm::GroupedRmsNorm(std::int64_t groups, std::int64_t size, double eps)
    : groups_(groups),
      weight_(declare({.name = "weight", .shape = {groups * size}, .decay = false, .init = Init::constant(0)})),
      eps_(eps) {}

Tensor GroupedRmsNorm::forward(const Tensor& x) const {
  const auto parts = x.chunk(groups_, 1), weights = weight_.value.chunk(groups_);
  std::vector<Tensor> normed;
  for (std::int64_t g = 0; g < groups_; ++g) normed.push_back(rms_norm(parts[g], weights[g], eps_, true));
  return at::stack(normed, 1);
}

}  // namespace sluice
