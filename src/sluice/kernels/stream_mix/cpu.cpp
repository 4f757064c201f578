// SPDX-License-Identifier: Apache-2.0
// CPU path: one pass in each direction, a token's mean in the first-level cache. With g the gradient that arrives, over
// n, and a = sigmoid(gate):
//   dx = g a      dgate = g x a (1 - a)
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/stream_mix/stream_mix.h"

namespace sluice {
namespace {

// Adds a stream's part to sum.
template <typename Scalar>
SLUICE_MULTIARCH void add_stream(const Scalar* __restrict x, const Scalar* __restrict gate, std::int64_t width,
                                 Wide<Scalar>* __restrict sum) {
  for (std::int64_t i = 0; i < width; ++i) sum[i] += sigmoid(widen(gate[i])).value * widen(x[i]);
}

template <typename Scalar>
SLUICE_MULTIARCH void mean_of(const Wide<Scalar>* __restrict sum, Wide<Scalar> streams, std::int64_t width,
                              Scalar* __restrict out) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = narrow<Scalar>(sum[i] / streams);
}

template <typename Scalar>
SLUICE_MULTIARCH void backward_stream(const Scalar* __restrict grad, const Scalar* __restrict x,
                                      const Scalar* __restrict gate, Wide<Scalar> streams, std::int64_t width,
                                      Scalar* __restrict grad_x, Scalar* __restrict grad_gate) {
  for (std::int64_t i = 0; i < width; ++i) {
    const auto a = sigmoid(widen(gate[i]));
    const auto g = widen(grad[i]) / streams;
    grad_x[i] = narrow<Scalar>(g * a.value);
    grad_gate[i] = narrow<Scalar>(g * widen(x[i]) * a.value * a.complement);
  }
}

Tensor forward_cpu(const Tensor& x, const Tensor& gate) {
  const auto own_x = x.contiguous(), own_gate = gate.contiguous();
  const auto tokens = x.size(0), streams = x.size(1), width = x.size(2);
  auto out = at::empty({tokens, width}, x.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "stream_mix", [&] {
    using Real = Wide<scalar_t>;
    const auto *xs = own_x.const_data_ptr<scalar_t>(), *gates = own_gate.const_data_ptr<scalar_t>();
    auto* outs = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, tokens, rows_per_task(streams * width), [&](std::int64_t first, std::int64_t last) {
      std::vector<Real> sum(static_cast<std::size_t>(width));
      for (auto token = first; token < last; ++token) {
        std::ranges::fill(sum, Real(0));
        for (auto row = token * streams; row < (token + 1) * streams; ++row) {
          add_stream(xs + row * width, gates + row * width, width, sum.data());
        }
        mean_of(sum.data(), static_cast<Real>(streams), width, outs + token * width);
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& gate) {
  const auto grad = grad_out.contiguous(), own_x = x.contiguous(), own_gate = gate.contiguous();
  const auto tokens = x.size(0), streams = x.size(1), width = x.size(2);
  auto grad_x = at::empty(x.sizes(), x.options()), grad_gate = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "stream_mix_backward", [&] {
    const auto* grads = grad.const_data_ptr<scalar_t>();
    const auto *xs = own_x.const_data_ptr<scalar_t>(), *gates = own_gate.const_data_ptr<scalar_t>();
    auto *grad_xs = grad_x.mutable_data_ptr<scalar_t>(), *grad_gates = grad_gate.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, tokens * streams, rows_per_task(width), [&](std::int64_t first, std::int64_t last) {
      for (auto row = first; row < last; ++row) {
        backward_stream(grads + row / streams * width, xs + row * width, gates + row * width,
                        static_cast<Wide<scalar_t>>(streams), width, grad_xs + row * width, grad_gates + row * width);
      }
    });
  });
  return {grad_x, grad_gate};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("stream_mix", forward_cpu);
  m.impl("stream_mix_backward", backward_cpu);
}

}  // namespace sluice
