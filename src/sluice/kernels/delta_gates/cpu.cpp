// SPDX-License-Identifier: Apache-2.0
// CPU path: T H values of each kind, next to nothing beside the projections, so passes through ATen serve. With
// x = a + dt_bias:
//   da = -dg exp(A_log) sigmoid(x)    db = dbeta beta (1 - beta)    dA_log = sum of dg g    ddt_bias = sum of da
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/delta_gates/delta_gates.h"

namespace sluice {
namespace {

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  auto [g, beta] = delta_gates_definition(a, b, A_log, dt_bias);
  return {g, beta};
}

// The sum over tokens. ATen cuts a sum by the number of threads; this one by the number of rows.
Tensor over_tokens(const Tensor& x) {
  const auto blocks = row_blocks(x.size(0), 128);
  const auto partial = at::empty({blocks.count, x.size(1)}, x.options());
  for (std::int64_t block = 0; block < blocks.count; ++block) {
    const auto rows = x.narrow(0, blocks.begin(block), blocks.end(block) - blocks.begin(block));
    partial[block].copy_(rows.sum(0));
  }
  return sum_in_order(partial);
}

std::tuple<Tensor, Tensor> backward_into_cpu(const Tensor& grad_g, const Tensor& grad_beta, const Tensor& a,
                                             const Tensor& b, const Tensor& A_log, const Tensor& dt_bias,
                                             Tensor& grad_a, Tensor& grad_b) {
  const auto type = wide_type(a.scalar_type());
  const auto g = delta_gates_definition(a, b, A_log, dt_bias).g;
  const auto d_a = -grad_g * A_log.exp() * (a.to(type) + dt_bias).sigmoid();
  const auto wide = b.to(type);
  const auto d_b = grad_beta * wide.sigmoid() * (-wide).sigmoid();
  const auto d_A_log = over_tokens(grad_g * g), d_dt_bias = over_tokens(d_a);
  grad_a.copy_(d_a);
  grad_b.copy_(d_b);
  return {d_A_log, d_dt_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("delta_gates", forward_cpu);
  m.impl("delta_gates_backward.into", backward_into_cpu);
}

}  // namespace sluice
