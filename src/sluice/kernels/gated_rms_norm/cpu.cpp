// SPDX-License-Identifier: Apache-2.0
// CPU path, row by row: a row stays in the first-level cache between the passes over it. With r = 1 / sqrt(mean(x^2) +
// eps), u = x r and h = g a(z) w, the gradient that reaches u:
//   dx = r (h - u mean(h u))      dz = g w u a'(z)      dw = sum over rows of g a(z) u
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"

namespace sluice {
namespace {

template <typename Real>
struct Opening {
  Real value, slope;  // a(z), a'(z)
};
template <bool kSilu, typename Real>
SLUICE_INLINE Opening<Real> open_gate(Real z) {
  const auto s = sigmoid(z);
  if constexpr (kSilu) return {z * s.value, s.value + z * s.value * s.complement};
  return {s.value, s.value * s.complement};
}

template <bool kSilu, typename Scalar>
SLUICE_MULTIARCH void forward_row(const Scalar* __restrict x, const Scalar* __restrict gate,
                                  const Wide<Scalar>* __restrict weight, Wide<Scalar> eps, std::int64_t width,
                                  Scalar* __restrict out) {
  const auto r = inverse_rms(x, width, eps);
  for (std::int64_t i = 0; i < width; ++i) {
    out[i] = narrow<Scalar>(weight[i] * (widen(x[i]) * r) * open_gate<kSilu>(widen(gate[i])).value);
  }
}

// grad_weight is added to; `reaching` [width] is scratch for h.
template <bool kSilu, typename Scalar>
SLUICE_MULTIARCH void backward_row(const Scalar* __restrict grad, const Scalar* __restrict x,
                                   const Scalar* __restrict gate, const Wide<Scalar>* __restrict weight,
                                   Wide<Scalar> eps, std::int64_t width, Wide<Scalar>* __restrict reaching,
                                   Scalar* __restrict grad_x, Scalar* __restrict grad_gate,
                                   Wide<Scalar>* __restrict grad_weight) {
  using Real = Wide<Scalar>;
  const auto r = inverse_rms(x, width, eps);
  for (std::int64_t i = 0; i < width; ++i) {
    const auto opening = open_gate<kSilu>(widen(gate[i]));
    const auto g = widen(grad[i]), unit = widen(x[i]) * r;
    grad_gate[i] = narrow<Scalar>(g * weight[i] * unit * opening.slope);
    grad_weight[i] += g * opening.value * unit;
    reaching[i] = g * opening.value * weight[i];
  }
  const auto dot = lane_sum<Real>(width, [=](std::int64_t i) { return reaching[i] * (widen(x[i]) * r); });
  const auto along = dot / static_cast<Real>(width);
  for (std::int64_t i = 0; i < width; ++i) {
    grad_x[i] = narrow<Scalar>(r * (reaching[i] - widen(x[i]) * r * along));
  }
}

template <bool kSilu, typename Scalar>
void forward_rows(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, Tensor& out) {
  const auto rows = rows_of(x), gate_rows = rows_of(gate);
  const auto *xs = x.const_data_ptr<Scalar>(), *gates = gate.const_data_ptr<Scalar>();
  const auto* weights = weight.const_data_ptr<Wide<Scalar>>();
  auto* outs = out.mutable_data_ptr<Scalar>();
  at::parallel_for(0, rows.count, rows_per_task(rows.width), [&](std::int64_t first, std::int64_t last) {
    for (auto row = first; row < last; ++row) {
      forward_row<kSilu, Scalar>(xs + rows.offset(row), gates + gate_rows.offset(row), weights,
                                 static_cast<Wide<Scalar>>(eps), rows.width, outs + row * rows.width);
    }
  });
}

// partial [blocks, V] is added to.
template <bool kSilu, typename Scalar>
void backward_rows(const Tensor& grad, const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                   const RowBlocks& blocks, Tensor& grad_x, Tensor& grad_gate, Tensor& partial) {
  const auto rows = rows_of(x), gate_rows = rows_of(gate), grad_rows = rows_of(grad);
  const auto *xs = x.const_data_ptr<Scalar>(), *gates = gate.const_data_ptr<Scalar>();
  const auto* grads = grad.const_data_ptr<Scalar>();
  const auto* weights = weight.const_data_ptr<Wide<Scalar>>();
  auto *grad_xs = grad_x.mutable_data_ptr<Scalar>(), *grad_gates = grad_gate.mutable_data_ptr<Scalar>();
  auto* partials = partial.mutable_data_ptr<Wide<Scalar>>();
  const auto grain = rows_per_task(blocks.size * rows.width);
  at::parallel_for(0, blocks.count, grain, [&](std::int64_t first, std::int64_t last) {
    std::vector<Wide<Scalar>> reaching(rows.width);
    for (auto block = first; block < last; ++block) {
      for (auto row = blocks.begin(block); row < blocks.end(block); ++row) {
        backward_row<kSilu, Scalar>(grads + grad_rows.offset(row), xs + rows.offset(row), gates + gate_rows.offset(row),
                                    weights, static_cast<Wide<Scalar>>(eps), rows.width, reaching.data(),
                                    grad_xs + row * rows.width, grad_gates + row * rows.width,
                                    partials + block * rows.width);
      }
    }
  });
}

Tensor forward_cpu(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, std::string_view activation) {
  const auto input = with_rows(x), gates = with_rows(gate);
  const auto wide_weight = weight.to(wide_type(x.scalar_type())).contiguous();
  auto out = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "gated_rms_norm", [&] {
    const auto run = activation == "silu" ? forward_rows<true, scalar_t> : forward_rows<false, scalar_t>;
    run(input, gates, wide_weight, eps, out);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& gate,
                                                const Tensor& weight, double eps, std::string_view activation) {
  const auto grad = with_rows(grad_out), input = with_rows(x), gates = with_rows(gate);
  const auto wide_weight = weight.to(wide_type(x.scalar_type())).contiguous();
  const auto blocks = row_blocks(x.size(0) * x.size(1), 32);
  auto grad_x = at::empty(x.sizes(), x.options()), grad_gate = at::empty(x.sizes(), x.options());
  auto partial = at::zeros({blocks.count, x.size(2)}, wide_weight.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "gated_rms_norm_backward", [&] {
    const auto run = activation == "silu" ? backward_rows<true, scalar_t> : backward_rows<false, scalar_t>;
    run(grad, input, gates, wide_weight, eps, blocks, grad_x, grad_gate, partial);
  });
  return {grad_x, grad_gate, sum_in_order(partial).to(weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("gated_rms_norm", forward_cpu);
  m.impl("gated_rms_norm_backward", backward_cpu);
}

}  // namespace sluice
