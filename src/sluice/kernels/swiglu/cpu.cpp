// SPDX-License-Identifier: Apache-2.0
// CPU path: one pass in each direction. With s = sigmoid(gate) and g the gradient that arrives:
//   dgate = g up (s + gate s (1 - s))      dup = g gate s
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/swiglu/swiglu.h"

namespace sluice {
namespace {

template <typename Scalar>
SLUICE_MULTIARCH void forward_row(const Scalar* __restrict gate, const Scalar* __restrict up, std::int64_t width,
                                  Scalar* __restrict out) {
  for (std::int64_t i = 0; i < width; ++i) {
    const auto x = widen(gate[i]);
    out[i] = narrow<Scalar>(x * sigmoid(x).value * widen(up[i]));
  }
}

template <typename Scalar>
SLUICE_MULTIARCH void backward_row(const Scalar* __restrict grad, const Scalar* __restrict gate,
                                   const Scalar* __restrict up, std::int64_t width, Scalar* __restrict grad_gate,
                                   Scalar* __restrict grad_up) {
  for (std::int64_t i = 0; i < width; ++i) {
    const auto x = widen(gate[i]), g = widen(grad[i]);
    const auto s = sigmoid(x);
    grad_gate[i] = narrow<Scalar>(g * widen(up[i]) * (s.value + x * s.value * s.complement));
    grad_up[i] = narrow<Scalar>(g * (x * s.value));
  }
}

Tensor forward_cpu(const Tensor& gate, const Tensor& up) {
  const auto own_gate = with_rows(gate), own_up = with_rows(up);
  const auto gate_rows = rows_of(own_gate), up_rows = rows_of(own_up);
  const auto width = gate_rows.width;
  auto out = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, gate.scalar_type(), "swiglu", [&] {
    const auto *gates = own_gate.const_data_ptr<scalar_t>(), *ups = own_up.const_data_ptr<scalar_t>();
    auto* outs = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, gate_rows.count, rows_per_task(width), [&](std::int64_t first, std::int64_t last) {
      for (auto row = first; row < last; ++row) {
        forward_row(gates + gate_rows.offset(row), ups + up_rows.offset(row), width, outs + row * width);
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& gate, const Tensor& up) {
  const auto grad = with_rows(grad_out), own_gate = with_rows(gate), own_up = with_rows(up);
  const auto grad_rows = rows_of(grad), gate_rows = rows_of(own_gate), up_rows = rows_of(own_up);
  const auto width = gate_rows.width;
  auto grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(up.sizes(), up.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, gate.scalar_type(), "swiglu_backward", [&] {
    const auto* grads = grad.const_data_ptr<scalar_t>();
    const auto *gates = own_gate.const_data_ptr<scalar_t>(), *ups = own_up.const_data_ptr<scalar_t>();
    auto *grad_gates = grad_gate.mutable_data_ptr<scalar_t>(), *grad_ups = grad_up.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, gate_rows.count, rows_per_task(width), [&](std::int64_t first, std::int64_t last) {
      for (auto row = first; row < last; ++row) {
        backward_row(grads + grad_rows.offset(row), gates + gate_rows.offset(row), ups + up_rows.offset(row), width,
                     grad_gates + row * width, grad_ups + row * width);
      }
    });
  });
  return {grad_gate, grad_up};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("swiglu", forward_cpu);
  m.impl("swiglu_backward", backward_cpu);
}

}  // namespace sluice
