// SPDX-License-Identifier: Apache-2.0
// CPU path: one pass in each direction. With g the gradient that arrives and a = sigmoid(gate):
//   dy = sum over s of 2 a_s g_s      dgate_s = 2 a_s (1 - a_s) (g_s . y)
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/stream_inject/stream_inject.h"

namespace sluice {
namespace {

template <typename Scalar>
SLUICE_MULTIARCH void inject_row(const Scalar* __restrict residual, const Scalar* __restrict y, Wide<Scalar> inject,
                                 std::int64_t width, Scalar* __restrict out) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = narrow<Scalar>(widen(residual[i]) + inject * widen(y[i]));
}

// Adds a stream's part of dy to sum; gives g . y.
template <typename Scalar>
SLUICE_MULTIARCH Wide<Scalar> backward_row(const Scalar* __restrict grad, const Scalar* __restrict y,
                                           Wide<Scalar> inject, std::int64_t width, Wide<Scalar>* __restrict sum) {
  for (std::int64_t i = 0; i < width; ++i) sum[i] += inject * widen(grad[i]);
  return lane_sum<Wide<Scalar>>(width, [=](std::int64_t i) { return widen(grad[i]) * widen(y[i]); });
}

template <typename Scalar>
SLUICE_MULTIARCH void narrow_row(const Wide<Scalar>* __restrict sum, std::int64_t width, Scalar* __restrict out) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = narrow<Scalar>(sum[i]);
}

Tensor forward_cpu(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  const auto own_residual = residual.contiguous(), own_y = y.contiguous(), own_gate = gate.contiguous();
  const auto streams = residual.size(1), width = residual.size(2);
  auto out = at::empty(residual.sizes(), residual.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, residual.scalar_type(), "stream_inject", [&] {
    const auto *residuals = own_residual.const_data_ptr<scalar_t>(), *ys = own_y.const_data_ptr<scalar_t>(),
               *gates = own_gate.const_data_ptr<scalar_t>();
    auto* outs = out.mutable_data_ptr<scalar_t>();
    const auto rows = residual.size(0) * streams;
    at::parallel_for(0, rows, rows_per_task(width), [&](std::int64_t first, std::int64_t last) {
      for (auto row = first; row < last; ++row) {
        inject_row(residuals + row * width, ys + row / streams * width, 2 * sigmoid(widen(gates[row])).value, width,
                   outs + row * width);
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& y, const Tensor& gate) {
  const auto grad = grad_out.contiguous(), own_y = y.contiguous(), own_gate = gate.contiguous();
  const auto tokens = y.size(0), streams = gate.size(1), width = y.size(1);
  auto grad_y = at::empty(y.sizes(), y.options()), grad_gate = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, y.scalar_type(), "stream_inject_backward", [&] {
    using Real = Wide<scalar_t>;
    const auto *grads = grad.const_data_ptr<scalar_t>(), *ys = own_y.const_data_ptr<scalar_t>(),
               *gates = own_gate.const_data_ptr<scalar_t>();
    auto *grad_ys = grad_y.mutable_data_ptr<scalar_t>(), *grad_gates = grad_gate.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, tokens, rows_per_task(streams * width), [&](std::int64_t first, std::int64_t last) {
      std::vector<Real> sum(static_cast<std::size_t>(width));
      for (auto token = first; token < last; ++token) {
        std::ranges::fill(sum, Real(0));
        for (auto row = token * streams; row < (token + 1) * streams; ++row) {
          const auto a = sigmoid(widen(gates[row]));
          const auto dot = backward_row(grads + row * width, ys + token * width, 2 * a.value, width, sum.data());
          grad_gates[row] = narrow<scalar_t>(2 * a.value * a.complement * dot);
        }
        narrow_row(sum.data(), width, grad_ys + token * width);
      }
    });
  });
  return {grad_y, grad_gate};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("stream_inject", forward_cpu);
  m.impl("stream_inject_backward", backward_cpu);
}

}  // namespace sluice
