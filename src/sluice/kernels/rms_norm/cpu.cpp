// SPDX-License-Identifier: Apache-2.0
// CPU path, row by row: a row stays in the first-level cache between the passes over it. With r = 1 / sqrt(mean(x^2) +
// eps), s = 1 + w or w and g the gradient that comes in:
//   dx = r (g s - x r^2 mean(g s x))      dw = sum over rows of g x r
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {
namespace {

template <typename Scalar>
SLUICE_MULTIARCH void forward_row(const Scalar* __restrict x, const Wide<Scalar>* __restrict scale, Wide<Scalar> eps,
                                  bool round_unit, std::int64_t width, Scalar* __restrict out) {
  const auto r = inverse_rms(x, width, eps);
  if (round_unit) {
    for (std::int64_t i = 0; i < width; ++i) out[i] = narrow<Scalar>(scale[i] * widen(narrow<Scalar>(widen(x[i]) * r)));
  } else {
    for (std::int64_t i = 0; i < width; ++i) out[i] = narrow<Scalar>(scale[i] * (widen(x[i]) * r));
  }
}

// grad_scale is added to.
template <typename Scalar>
SLUICE_MULTIARCH void backward_row(const Scalar* __restrict grad, const Scalar* __restrict x,
                                   const Wide<Scalar>* __restrict scale, Wide<Scalar> eps, std::int64_t width,
                                   Scalar* __restrict grad_x, Wide<Scalar>* __restrict grad_scale) {
  using Real = Wide<Scalar>;
  const auto r = inverse_rms(x, width, eps);
  const auto dot = lane_sum<Real>(width, [=](std::int64_t i) { return widen(grad[i]) * scale[i] * widen(x[i]); });
  const auto along = r > 0 ? dot * r * r / static_cast<Real>(width) : 0;  // r = 0: the squares overflowed
  for (std::int64_t i = 0; i < width; ++i) {
    const auto g = widen(grad[i]), value = widen(x[i]);
    grad_x[i] = narrow<Scalar>(r * (g * scale[i] - value * along));
    grad_scale[i] += g * (value * r);
  }
}

Tensor scale_of(const Tensor& weight, at::ScalarType type, bool zero_centered) {
  const auto wide = weight.to(wide_type(type)).contiguous();
  return zero_centered ? wide + 1 : wide;
}

Tensor forward_cpu(const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
  const auto input = with_rows(x);
  const auto rows = rows_of(input);
  const auto scale = scale_of(weight, x.scalar_type(), zero_centered);
  const auto heads = scale.numel() / rows.width;  // rows take the weights in turn
  auto out = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "rms_norm", [&] {
    const auto* xs = input.const_data_ptr<scalar_t>();
    const auto* scales = scale.const_data_ptr<Wide<scalar_t>>();
    auto* outs = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows.count, rows_per_task(rows.width), [&](std::int64_t first, std::int64_t last) {
      for (auto row = first; row < last; ++row) {
        forward_row<scalar_t>(xs + rows.offset(row), scales + row % heads * rows.width,
                              static_cast<Wide<scalar_t>>(eps), !zero_centered, rows.width, outs + row * rows.width);
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight, double eps,
                                        bool zero_centered) {
  const auto input = with_rows(x), grad = with_rows(grad_out);
  const auto rows = rows_of(input), grad_rows = rows_of(grad);
  const auto scale = scale_of(weight, x.scalar_type(), zero_centered);
  const auto heads = scale.numel() / rows.width;
  const auto blocks = row_blocks(rows.count, 32);
  auto grad_x = at::empty(x.sizes(), x.options());
  auto partial = at::zeros({blocks.count, scale.numel()}, scale.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "rms_norm_backward", [&] {
    const auto *xs = input.const_data_ptr<scalar_t>(), *grads = grad.const_data_ptr<scalar_t>();
    const auto* scales = scale.const_data_ptr<Wide<scalar_t>>();
    auto* grad_xs = grad_x.mutable_data_ptr<scalar_t>();
    auto* partials = partial.mutable_data_ptr<Wide<scalar_t>>();
    at::parallel_for(
        0, blocks.count, rows_per_task(blocks.size * rows.width), [&](std::int64_t first, std::int64_t last) {
          for (auto block = first; block < last; ++block) {
            for (auto row = blocks.begin(block); row < blocks.end(block); ++row) {
              const auto head = row % heads * rows.width;
              backward_row<scalar_t>(grads + grad_rows.offset(row), xs + rows.offset(row), scales + head,
                                     static_cast<Wide<scalar_t>>(eps), rows.width, grad_xs + row * rows.width,
                                     partials + block * heads * rows.width + head);
            }
          }
        });
  });
  return {grad_x, sum_in_order(partial).view(weight.sizes()).to(weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("rms_norm", forward_cpu);
  m.impl("rms_norm_backward", backward_cpu);
}

}  // namespace sluice
