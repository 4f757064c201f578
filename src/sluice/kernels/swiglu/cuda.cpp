// SPDX-License-Identifier: Apache-2.0
// The gated activation on CUDA tensors: from tensors to params to launch.
#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/swiglu/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "swiglu";

SwiGluRows rows_of(const Tensor& x) { return {x.const_data_ptr(), x.stride(0)}; }

SwiGluParams make_params(const Tensor& gate, const Tensor& up) {
  check_device(kOp, "up", up, gate);
  return {.gate = rows_of(gate),
          .up = rows_of(up),
          .tokens = gate.size(0),
          .features = static_cast<std::int32_t>(gate.size(1)),
          .bfloat16 = is_bfloat16(kOp, "gate", gate),
          .out = nullptr};
}

Tensor forward_cuda(const Tensor& gate, const Tensor& up) {
  const c10::cuda::CUDAGuard device(gate.device());
  const auto own_gate = with_dense_rows(gate), own_up = with_dense_rows(up);
  auto out = at::empty(gate.sizes(), gate.options());
  auto params = make_params(own_gate, own_up);
  params.out = out.mutable_data_ptr();
  check_launch(kOp, launch_swiglu(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& gate, const Tensor& up) {
  const c10::cuda::CUDAGuard device(gate.device());
  const auto own_gate = with_dense_rows(gate), own_up = with_dense_rows(up), grad = with_dense_rows(grad_out);
  auto grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(up.sizes(), up.options());
  const SwiGluBackwardParams params{.forward = make_params(own_gate, own_up),
                                    .grad_out = rows_of(grad),
                                    .grad_gate = grad_gate.mutable_data_ptr(),
                                    .grad_up = grad_up.mutable_data_ptr()};
  check_launch(kOp, launch_swiglu_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_gate, grad_up};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("swiglu", forward_cuda);
  m.impl("swiglu_backward", backward_cuda);
}

}  // namespace
}  // namespace sluice
