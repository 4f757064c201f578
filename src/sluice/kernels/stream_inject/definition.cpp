// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/stream_inject/stream_inject.h"

namespace sluice {

Tensor stream_inject_definition(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  const auto type = wide_type(residual.scalar_type());
  const auto inject = 2 * gate.to(type).sigmoid();
  return (residual.to(type) + inject.unsqueeze(2) * y.to(type).unsqueeze(1)).to(residual.scalar_type());
}

}  // namespace sluice
