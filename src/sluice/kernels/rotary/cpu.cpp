// SPDX-License-Identifier: Apache-2.0
// CPU path: one pass over each head of each token.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/rotary/rotary.h"

namespace sluice {
namespace {

template <typename Scalar>
SLUICE_MULTIARCH void rotate(const Scalar* __restrict x, const Wide<Scalar>* __restrict cos,
                             const Wide<Scalar>* __restrict sin, std::int64_t half, std::int64_t width,
                             Scalar* __restrict out) {
  for (std::int64_t j = 0; j < half; ++j) {
    const auto first = widen(x[j]), second = widen(x[j + half]);
    out[j] = narrow<Scalar>(first * cos[j] - second * sin[j]);
    out[j + half] = narrow<Scalar>(second * cos[j] + first * sin[j]);
  }
  for (auto j = 2 * half; j < width; ++j) out[j] = x[j];
}

Tensor forward_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto input = with_rows(x);
  const auto rows = rows_of(input);
  const auto type = wide_type(x.scalar_type());
  const auto cosines = cos.to(type).contiguous(), sines = sin.to(type).contiguous();
  const auto heads = x.size(1), half = cos.size(1);
  auto out = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "rotary", [&] {
    const auto* xs = input.const_data_ptr<scalar_t>();
    const auto *cs = cosines.const_data_ptr<Wide<scalar_t>>(), *ss = sines.const_data_ptr<Wide<scalar_t>>();
    auto* outs = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows.count, rows_per_task(rows.width), [&](std::int64_t first, std::int64_t last) {
      for (auto row = first; row < last; ++row) {
        const auto angles = row / heads * half;
        rotate<scalar_t>(xs + rows.offset(row), cs + angles, ss + angles, half, rows.width, outs + row * rows.width);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) { m.impl("rotary", forward_cpu); }

}  // namespace sluice
