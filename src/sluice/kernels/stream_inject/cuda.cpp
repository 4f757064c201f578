// SPDX-License-Identifier: Apache-2.0
// The way back into the streams on CUDA tensors: from tensors to params to launch.
#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/stream_inject/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "stream_inject";

StreamInjectParams make_params(const Tensor& y, const Tensor& gate) {
  check_device(kOp, "gate", gate, y);
  SLUICE_CHECK(gate.size(1) <= kMaxInjectStreams, "{}: on a GPU there may be at most {} streams; got gate {}", kOp,
               kMaxInjectStreams, describe(gate));
  return {.residual = nullptr,
          .y = y.const_data_ptr(),
          .gate = gate.const_data_ptr(),
          .tokens = y.size(0),
          .streams = static_cast<std::int32_t>(gate.size(1)),
          .width = static_cast<std::int32_t>(y.size(1)),
          .bfloat16 = is_bfloat16(kOp, "y", y),
          .out = nullptr};
}

Tensor forward_cuda(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  const c10::cuda::CUDAGuard device(y.device());
  check_device(kOp, "residual", residual, y);
  const auto own_residual = residual.contiguous(), own_y = y.contiguous(), own_gate = gate.contiguous();
  auto out = at::empty(residual.sizes(), residual.options());
  auto params = make_params(own_y, own_gate);
  params.residual = own_residual.const_data_ptr();
  params.out = out.mutable_data_ptr();
  check_launch(kOp, launch_stream_inject(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& y, const Tensor& gate) {
  const c10::cuda::CUDAGuard device(y.device());
  const auto grad = grad_out.contiguous(), own_y = y.contiguous(), own_gate = gate.contiguous();
  auto grad_y = at::empty(y.sizes(), y.options()), grad_gate = at::empty(gate.sizes(), gate.options());
  const StreamInjectBackwardParams params{.forward = make_params(own_y, own_gate),
                                          .grad_out = grad.const_data_ptr(),
                                          .grad_y = grad_y.mutable_data_ptr(),
                                          .grad_gate = grad_gate.mutable_data_ptr()};
  check_launch(kOp, launch_stream_inject_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_y, grad_gate};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("stream_inject", forward_cuda);
  m.impl("stream_inject_backward", backward_cuda);
}

}  // namespace
}  // namespace sluice
