// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {

Tensor rms_norm_definition(const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
  const auto type = wide_type(x.scalar_type());
  const auto wide = x.to(type), w = weight.to(type);
  const auto unit = wide * (wide.square().mean(-1, true) + eps).rsqrt();
  const auto y = zero_centered ? unit * (1 + w) : w * unit.to(x.scalar_type()).to(type);
  return y.to(x.scalar_type());
}

}  // namespace sluice
