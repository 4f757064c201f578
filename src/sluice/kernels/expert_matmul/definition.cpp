// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/expert_matmul/expert_matmul.h"

namespace sluice {

Tensor expert_matmul_definition(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                                const std::optional<Tensor>& x_rows, const std::optional<Tensor>& out_rows,
                                std::int64_t out_size) {
  const auto type = wide_type(x.scalar_type());
  const auto bounds = sequence_bounds(offsets);
  const auto lines = at::arange(bounds.back(), at::TensorOptions().dtype(kLong));
  const auto from = x_rows.value_or(lines), to = out_rows.value_or(lines);
  auto out = at::zeros({out_size, weight.size(1)}, x.options().dtype(type));
  for (std::int64_t e = 0; e < weight.size(0); ++e) {
    const auto first = bounds[e], count = bounds[e + 1] - first;
    const auto product = x.to(type).index_select(0, from.narrow(0, first, count)).matmul(weight[e].to(type).t());
    out = out.index_add(0, to.narrow(0, first, count), product);
  }
  return out;
}

}  // namespace sluice
