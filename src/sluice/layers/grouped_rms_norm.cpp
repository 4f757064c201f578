// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/grouped_rms_norm.h"

#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {

GroupedRmsNorm::GroupedRmsNorm(std::int64_t groups, std::int64_t size, double eps)
    : groups_(groups),
      weight_(declare({.name = "weight", .shape = {groups * size}, .decay = false, .init = Init::constant(0)})),
      eps_(eps) {}

Tensor GroupedRmsNorm::forward(const Tensor& x) const {
  const auto size = weight_.value.size(0) / groups_;
  return rms_norm(x.unflatten(1, {groups_, size}), weight_.value.view({groups_, size}), eps_, /*zero_centered=*/true);
}

}  // namespace sluice
