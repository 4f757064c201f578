// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"

namespace sluice {

Tensor gated_rms_norm_definition(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                                 GateActivation activation) {
  const auto type = wide_type(x.scalar_type());
  const auto wide = x.to(type), z = gate.to(type);
  const auto unit = wide * (wide.square().mean(-1, true) + eps).rsqrt();
  const auto opening = activation == GateActivation::kSilu ? z * z.sigmoid() : z.sigmoid();
  return (weight.to(type) * unit * opening).to(x.scalar_type());
}

}  // namespace sluice
