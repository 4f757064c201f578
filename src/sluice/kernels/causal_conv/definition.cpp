// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {

CausalConvOutput causal_conv_definition(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                        const std::optional<Tensor>& initial_state, bool silu) {
  const auto type = wide_type(x.scalar_type());
  const auto channels = x.size(1), width = weight.size(2);
  const auto bounds = sequence_bounds(cu_seqlens);
  std::vector<Tensor> outputs{at::zeros({0, channels}, x.options().dtype(type))}, states;
  for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
    const auto length = bounds[n + 1] - bounds[n];
    const auto before = initial_state ? initial_state->select(0, static_cast<std::int64_t>(n)).t()
                                      : at::zeros({width - 1, channels}, x.options());
    const auto u = at::cat({before, x.narrow(0, bounds[n], length)});  // [W - 1 + length, C]
    auto sum = at::zeros({length, channels}, x.options().dtype(type));
    for (std::int64_t j = 0; j < width; ++j) {
      sum = sum + weight.select(2, j).squeeze(1).to(type) * u.narrow(0, j, length).to(type);
    }
    outputs.push_back(silu ? sum * sum.sigmoid() : sum);
    states.push_back(u.narrow(0, length, width - 1).t());
  }
  const auto final_state = states.empty() ? at::zeros({0, channels, width - 1}, x.options()) : at::stack(states);
  return {at::cat(outputs).to(x.scalar_type()), final_state};
}

}  // namespace sluice
