// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/rotary/rotary.h"

namespace sluice {

Tensor rotary_definition(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto type = wide_type(x.scalar_type());
  const auto half = cos.size(1);
  const auto c = cos.to(type).unsqueeze(1), s = sin.to(type).unsqueeze(1);  // [T, 1, rd/2]
  const auto wide = x.to(type);
  const auto first = wide.narrow(2, 0, half), second = wide.narrow(2, half, half);
  const auto rest = wide.narrow(2, 2 * half, x.size(2) - 2 * half);
  return at::cat({first * c - second * s, second * c + first * s, rest}, 2).to(x.scalar_type());
}

}  // namespace sluice
