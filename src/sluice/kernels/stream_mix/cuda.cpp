// SPDX-License-Identifier: Apache-2.0
// The mix of streams on CUDA tensors: from tensors to params to launch.
#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/stream_mix/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "stream_mix";

StreamMixParams make_params(const Tensor& x, const Tensor& gate) {
  check_device(kOp, "gate", gate, x);
  return {.x = x.const_data_ptr(),
          .gate = gate.const_data_ptr(),
          .tokens = x.size(0),
          .streams = static_cast<std::int32_t>(x.size(1)),
          .width = static_cast<std::int32_t>(x.size(2)),
          .bfloat16 = is_bfloat16(kOp, "x", x),
          .out = nullptr};
}

Tensor forward_cuda(const Tensor& x, const Tensor& gate) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto own_x = x.contiguous(), own_gate = gate.contiguous();
  auto out = at::empty({x.size(0), x.size(2)}, x.options());
  auto params = make_params(own_x, own_gate);
  params.out = out.mutable_data_ptr();
  check_launch(kOp, launch_stream_mix(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& gate) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto own_x = x.contiguous(), own_gate = gate.contiguous(), grad = grad_out.contiguous();
  auto grad_x = at::empty(x.sizes(), x.options()), grad_gate = at::empty(gate.sizes(), gate.options());
  const StreamMixBackwardParams params{.forward = make_params(own_x, own_gate),
                                       .grad_out = grad.const_data_ptr(),
                                       .grad_x = grad_x.mutable_data_ptr(),
                                       .grad_gate = grad_gate.mutable_data_ptr()};
  check_launch(kOp, launch_stream_mix_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_x, grad_gate};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("stream_mix", forward_cuda);
  m.impl("stream_mix_backward", backward_cuda);
}

}  // namespace
}  // namespace sluice
