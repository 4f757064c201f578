// SPDX-License-Identifier: Apache-2.0
// Rotary embedding on CUDA tensors: from tensors to params to launch.
#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/rotary/params.h"

namespace sluice {
namespace {

Tensor forward_cuda(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  constexpr auto op = "rotary";
  const c10::cuda::CUDAGuard device(x.device());
  check_device(op, "cos", cos, x);
  check_device(op, "sin", sin, x);
  const auto input = with_dense_rows(x);
  const auto cosines = cos.contiguous(), sines = sin.contiguous();
  auto out = at::empty(x.sizes(), x.options());
  RotaryParams params{};
  params.bfloat16 = is_bfloat16(op, "x", x);
  params.x = input.const_data_ptr();
  params.token_stride = input.stride(0);
  params.head_stride = input.stride(1);
  params.cos = cosines.const_data_ptr<float>();
  params.sin = sines.const_data_ptr<float>();
  params.tokens = x.size(0);
  params.heads = static_cast<std::int32_t>(x.size(1));
  params.head_dim = static_cast<std::int32_t>(x.size(2));
  params.half = static_cast<std::int32_t>(cos.size(1));
  params.out = out.mutable_data_ptr();
  check_launch(op, launch_rotary(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) { m.impl("rotary", forward_cuda); }

}  // namespace
}  // namespace sluice
