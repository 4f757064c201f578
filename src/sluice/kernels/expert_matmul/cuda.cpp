// SPDX-License-Identifier: Apache-2.0
// Experts on CUDA tensors: libtorch's grouped matrix product (CUTLASS) over lines that are gathered before it and
// summed after it. Nothing waits for the device, so the row lists are not checked against the sizes.
#include <ATen/ops/_grouped_mm.h>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/expert_matmul/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "expert_matmul";
using Optional = const std::optional<Tensor>&;

// The grouped product addresses rows by vectors of 16 bytes.
void check_operand(const char* name, const Tensor& x, std::int64_t width) {
  SLUICE_CHECK(x.scalar_type() == kBFloat16 && width % 8 == 0,
               "{}: on a GPU {} must be bfloat16 and its width a multiple of 8; got {}", kOp, name, describe(x));
}

Tensor gathered(const Tensor& x, Optional rows) { return rows ? x.index_select(0, *rows) : x.contiguous(); }

Tensor ends_of(const Tensor& offsets) { return offsets.narrow(0, 1, offsets.size(0) - 1).contiguous(); }

// Row r of the result is the sum of the lines whose `rows` is r.
Tensor summed(const Tensor& lines, const Tensor& rows, std::int64_t size) {
  const auto [sorted, order] = rows.sort(/*stable=*/true, 0, /*descending=*/false);
  const auto begin = at::searchsorted(sorted, at::arange(size + 1, sorted.options()), /*out_int32=*/true);
  auto out = at::empty({size, lines.size(1)}, lines.options());
  const SumLinesParams params{.lines = lines.const_data_ptr(),
                              .order = order.const_data_ptr<std::int64_t>(),
                              .begin = begin.const_data_ptr<std::int32_t>(),
                              .rows = size,
                              .width = static_cast<std::int32_t>(lines.size(1)),
                              .out = out.mutable_data_ptr()};
  check_launch(kOp, launch_sum_lines(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

Tensor forward_cuda(const Tensor& x, const Tensor& weight, const Tensor& offsets, Optional x_rows, Optional out_rows,
                    std::int64_t out_size) {
  const c10::cuda::CUDAGuard device(x.device());
  check_operand("x", x, x.size(1));
  check_operand("weight", weight, weight.size(1));
  const auto from = gathered(x, x_rows);
  const auto matrices = weight.stride(1) == 1 || weight.stride(2) == 1 ? weight : weight.contiguous();
  if (from.size(0) == 0) return at::zeros({out_size, weight.size(1)}, x.options());
  const auto lines = at::_grouped_mm(from, matrices.transpose(1, 2), ends_of(offsets));
  if (out_rows) return summed(lines, *out_rows, out_size);
  SLUICE_CHECK(lines.size(0) == out_size,
               "{}: without out_rows there must be a row for each of the {} lines; out_size is {}", kOp, lines.size(0),
               out_size);
  return lines;
}

Tensor backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& offsets, Optional out_rows,
                     Optional x_rows) {
  const c10::cuda::CUDAGuard device(x.device());
  check_operand("the gradient", grad_out, grad_out.size(1));
  check_operand("x", x, x.size(1));
  const auto grad = gathered(grad_out, out_rows), from = gathered(x, x_rows);
  const auto experts = offsets.size(0) - 1, size = grad.size(1) * from.size(1);
  if (from.size(0) == 0) return at::zeros({experts, grad.size(1), from.size(1)}, x.options());
  auto grad_weight = at::_grouped_mm(grad.t(), from, ends_of(offsets));
  const auto bounds = offsets.contiguous();
  const ClearUnusedParams params{.offsets = bounds.const_data_ptr<std::int32_t>(),
                                 .experts = experts,
                                 .size = size,
                                 .matrices = grad_weight.mutable_data_ptr()};
  check_launch(kOp, launch_clear_unused(params, c10::cuda::getCurrentCUDAStream()));
  return grad_weight;
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("expert_matmul", forward_cuda);
  m.impl("expert_matmul_backward", backward_cuda);
}

}  // namespace
}  // namespace sluice
