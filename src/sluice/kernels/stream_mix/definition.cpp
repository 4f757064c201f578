// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/stream_mix/stream_mix.h"

namespace sluice {

Tensor stream_mix_definition(const Tensor& x, const Tensor& gate) {
  const auto type = wide_type(x.scalar_type());
  return (gate.to(type).sigmoid() * x.to(type)).mean(1).to(x.scalar_type());
}

}  // namespace sluice
