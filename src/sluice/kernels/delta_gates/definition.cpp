// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/delta_gates/delta_gates.h"

namespace sluice {

DeltaGates delta_gates_definition(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  const auto type = wide_type(a.scalar_type());
  const auto x = a.to(type) + dt_bias;
  const auto softplus = at::clamp_min(x, 0) + at::log1p(at::exp(-x.abs()));
  return {-A_log.exp() * softplus, b.to(type).sigmoid()};
}

}  // namespace sluice
