// SPDX-License-Identifier: Apache-2.0
// The norm on CUDA tensors: from tensors to params to launch.
#include <limits>
#include <tuple>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/rms_norm/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "rms_norm";

// x [..., D] as [tokens, heads, D] with dense rows; copied where strides do not allow it.
Tensor as_rows(const Tensor& x) {
  const auto width = x.size(-1);
  return with_dense_rows(x.dim() == 3 ? x : x.reshape({x.numel() / width, 1, width}));
}

RmsNormRows rows_of(const Tensor& rows) { return {rows.const_data_ptr(), rows.stride(0), rows.stride(1)}; }

RmsNormParams make_params(const Tensor& rows, const Tensor& weight, double eps, bool zero_centered) {
  check_device(kOp, "weight", weight, rows);
  SLUICE_CHECK(rows.size(0) * rows.size(1) <= std::numeric_limits<std::int32_t>::max(), "{}: too many rows: {}", kOp,
               describe(rows));
  RmsNormParams params{};
  params.x = rows_of(rows);
  params.weight = weight.const_data_ptr();
  params.rows = rows.size(0) * rows.size(1);
  params.heads = static_cast<std::int32_t>(rows.size(1));
  params.width = static_cast<std::int32_t>(rows.size(2));
  params.weight_heads = static_cast<std::int32_t>(weight.numel() / rows.size(2));
  params.bfloat16 = is_bfloat16(kOp, "x", rows);
  params.bfloat16_weight = is_bfloat16(kOp, "weight", weight);
  params.eps = static_cast<float>(eps);
  params.zero_centered = zero_centered;
  return params;
}

Tensor forward_cuda(const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto rows = as_rows(x), gain = weight.contiguous();
  auto out = at::empty(x.sizes(), x.options());
  auto params = make_params(rows, gain, eps, zero_centered);
  params.out = out.mutable_data_ptr();
  check_launch(kOp, launch_rms_norm(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& weight, double eps,
                                         bool zero_centered) {
  const c10::cuda::CUDAGuard device(x.device());
  check_device(kOp, "grad_out", grad_out, x);
  SLUICE_CHECK(grad_out.sizes() == x.sizes() && grad_out.scalar_type() == x.scalar_type(),
               "rms_norm_backward: grad_out must be as x, {}; got {}", describe(x), describe(grad_out));
  const auto rows = as_rows(x), grad_rows = as_rows(grad_out), gain = weight.contiguous();
  auto grad_x = at::empty(x.sizes(), x.options()), grad_weight = at::empty(weight.sizes(), weight.options());
  RmsNormBackwardParams params{};
  params.forward = make_params(rows, gain, eps, zero_centered);
  const auto partial = at::empty({rms_norm_blocks(params.forward), weight.numel()}, x.options().dtype(kFloat));
  params.grad_out = rows_of(grad_rows);
  params.partial = partial.mutable_data_ptr<float>();
  params.grad_x = grad_x.mutable_data_ptr();
  params.grad_weight = grad_weight.mutable_data_ptr();
  check_launch(kOp, launch_rms_norm_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_x, grad_weight};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("rms_norm", forward_cuda);
  m.impl("rms_norm_backward", backward_cuda);
}

}  // namespace
}  // namespace sluice
