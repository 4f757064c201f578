// SPDX-License-Identifier: Apache-2.0
// The gates on CUDA tensors: from tensors to params to launch.
#include <limits>
#include <tuple>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/delta_gates/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "delta_gates";

// What the params point into. Held until the launch.
struct Inputs {
  Tensor a, b, A_log, dt_bias;
};

Inputs make_inputs(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  SLUICE_CHECK(a.scalar_type() == kFloat || a.scalar_type() == kBFloat16,
               "delta_gates: on a GPU a and b must be float32 or bfloat16; got {}", describe(a));
  SLUICE_CHECK(a.size(0) <= std::numeric_limits<std::int32_t>::max() && b.device() == a.device() &&
                   A_log.device() == a.device() && dt_bias.device() == a.device(),
               "delta_gates: b, A_log and dt_bias must be on the device of a, {}", a.device().str());
  return {with_dense_rows(a), with_dense_rows(b), A_log.contiguous(), dt_bias.contiguous()};
}

DeltaGatesParams make_params(const Inputs& in) {
  DeltaGatesParams params{};
  params.a = in.a.const_data_ptr();
  params.b = in.b.const_data_ptr();
  params.A_log = in.A_log.const_data_ptr<float>();
  params.dt_bias = in.dt_bias.const_data_ptr<float>();
  params.tokens = static_cast<std::int32_t>(in.a.size(0));
  params.heads = static_cast<std::int32_t>(in.a.size(1));
  params.a_stride = in.a.stride(0);
  params.b_stride = in.b.stride(0);
  params.bfloat16 = in.a.scalar_type() == kBFloat16;
  return params;
}

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  const c10::cuda::CUDAGuard device(a.device());
  const Inputs inputs = make_inputs(a, b, A_log, dt_bias);
  DeltaGatesParams params = make_params(inputs);
  const auto options = a.options().dtype(kFloat);
  const Tensor g = at::empty(a.sizes(), options), beta = at::empty(a.sizes(), options);
  params.g = g.mutable_data_ptr<float>();
  params.beta = beta.mutable_data_ptr<float>();
  check_launch(kOp, launch_delta_gates(params, c10::cuda::getCurrentCUDAStream()));
  return {g, beta};
}

std::tuple<Tensor, Tensor> backward_into_cuda(const Tensor& grad_g, const Tensor& grad_beta, const Tensor& a,
                                              const Tensor& b, const Tensor& A_log, const Tensor& dt_bias,
                                              Tensor& grad_a, Tensor& grad_b) {
  const c10::cuda::CUDAGuard device(a.device());
  const Inputs inputs = make_inputs(a, b, A_log, dt_bias);
  for (const Tensor& grad : {grad_g, grad_beta}) {
    SLUICE_CHECK(grad.sizes() == a.sizes() && grad.scalar_type() == kFloat && grad.device() == a.device(),
                 "delta_gates_backward: grad_g and grad_beta must be float32 {} on {}; got {}", c10::str(a.sizes()),
                 a.device().str(), describe(grad));
  }
  for (const Tensor& grad : {grad_a, grad_b}) {
    SLUICE_CHECK(grad.sizes() == a.sizes() && grad.scalar_type() == a.scalar_type() && grad.device() == a.device() &&
                     (grad.stride(1) == 1 || grad.numel() == 0),
                 "delta_gates_backward: grad_a and grad_b must be as a, {}, with neighbouring heads; got {}",
                 describe(a), describe(grad));
  }
  const Tensor g_grad = grad_g.contiguous(), beta_grad = grad_beta.contiguous();
  DeltaGatesBackwardParams params{};
  params.forward = make_params(inputs);
  params.grad_g = g_grad.const_data_ptr<float>();
  params.grad_beta = beta_grad.const_data_ptr<float>();
  const auto options = a.options().dtype(kFloat);
  const Tensor partial = at::empty({delta_gates_strips(params.forward.tokens), 2, a.size(1)}, options);
  params.partial = partial.mutable_data_ptr<float>();
  params.grad_a = grad_a.mutable_data_ptr();
  params.grad_b = grad_b.mutable_data_ptr();
  params.grad_a_stride = grad_a.stride(0);
  params.grad_b_stride = grad_b.stride(0);
  const Tensor grad_A_log = at::empty(A_log.sizes(), options), grad_dt_bias = at::empty(dt_bias.sizes(), options);
  params.grad_A_log = grad_A_log.mutable_data_ptr<float>();
  params.grad_dt_bias = grad_dt_bias.mutable_data_ptr<float>();
  check_launch(kOp, launch_delta_gates_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_A_log, grad_dt_bias};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("delta_gates", forward_cuda);
  m.impl("delta_gates_backward.into", backward_into_cuda);
}

}  // namespace
}  // namespace sluice
