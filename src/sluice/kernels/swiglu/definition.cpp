// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/swiglu/swiglu.h"

namespace sluice {

Tensor swiglu_definition(const Tensor& gate, const Tensor& up) {
  const auto type = wide_type(gate.scalar_type());
  const auto x = gate.to(type);
  return (x * x.sigmoid() * up.to(type)).to(gate.scalar_type());
}

}  // namespace sluice
