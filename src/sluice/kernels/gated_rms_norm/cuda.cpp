// SPDX-License-Identifier: Apache-2.0
// The gated norm on CUDA tensors: from tensors to params to launch.
#include <limits>
#include <tuple>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/gated_rms_norm/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "gated_rms_norm";

NormType norm_type(const Tensor& x) {
  SLUICE_CHECK(x.scalar_type() == kFloat || x.scalar_type() == kBFloat16,
               "gated_rms_norm: on a GPU x, gate and weight must be float32 or bfloat16; got {}", describe(x));
  return x.scalar_type() == kFloat ? NormType::kFp32 : NormType::kBf16;
}

NormRows rows_of(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1)}; }
MutableNormRows mutable_rows_of(const Tensor& x) { return {x.mutable_data_ptr(), x.stride(0), x.stride(1)}; }

GatedRmsNormParams make_params(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                               std::string_view activation) {
  SLUICE_CHECK(gate.device() == x.device() && weight.device() == x.device(),
               "gated_rms_norm: gate and weight must be on the device of x, {}", x.device().str());
  SLUICE_CHECK(x.size(0) * x.size(1) <= std::numeric_limits<std::int32_t>::max(),
               "gated_rms_norm: too many rows in one pack: x is {}; split it", describe(x));
  GatedRmsNormParams params{};
  params.x = rows_of(x);
  params.gate = rows_of(gate);
  params.weight = weight.const_data_ptr();
  params.tokens = x.size(0);
  params.heads = static_cast<std::int32_t>(x.size(1));
  params.value_dim = static_cast<std::int32_t>(x.size(2));
  params.type = norm_type(x);
  params.weight_type = norm_type(weight);
  params.eps = static_cast<float>(eps);
  params.silu = activation == "silu";
  return params;
}

Tensor forward_cuda(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                    std::string_view activation) {
  const c10::cuda::CUDAGuard device(x.device());
  const Tensor input = with_dense_rows(x), gates = with_dense_rows(gate), gain = weight.contiguous();
  const Tensor out = at::empty(x.sizes(), x.options());
  GatedRmsNormParams params = make_params(input, gates, gain, eps, activation);
  params.out = mutable_rows_of(out);
  check_launch(kOp, launch_gated_rms_norm(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

Tensor backward_into_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                          std::string_view activation, Tensor& grad_x, Tensor& grad_gate) {
  const c10::cuda::CUDAGuard device(x.device());
  for (const Tensor& grad : {grad_out, grad_x, grad_gate}) {
    SLUICE_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && grad.device() == x.device(),
                 "gated_rms_norm_backward: gradients must have the shape, dtype and device of x, {}; got {}",
                 describe(x), describe(grad));
  }
  SLUICE_CHECK(x.numel() == 0 || (grad_x.stride(2) == 1 && grad_gate.stride(2) == 1),
               "gated_rms_norm_backward: rows of grad_x and grad_gate must be dense");
  const Tensor input = with_dense_rows(x), gates = with_dense_rows(gate), grad = with_dense_rows(grad_out);
  const Tensor gain = weight.contiguous();
  const Tensor grad_weight = at::empty(weight.sizes(), weight.options());
  const Tensor partial =
      at::empty({gated_rms_norm_blocks(x.size(0) * x.size(1)), x.size(2)}, x.options().dtype(kFloat));
  GatedRmsNormBackwardParams params{};
  params.forward = make_params(input, gates, gain, eps, activation);
  params.grad_out = rows_of(grad);
  params.partial = partial.mutable_data_ptr<float>();
  params.grad_x = mutable_rows_of(grad_x);
  params.grad_gate = mutable_rows_of(grad_gate);
  params.grad_weight = grad_weight.mutable_data_ptr();
  check_launch(kOp, launch_gated_rms_norm_backward(params, c10::cuda::getCurrentCUDAStream()));
  return grad_weight;
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& gate,
                                                 const Tensor& weight, double eps, std::string_view activation) {
  Tensor grad_x = at::empty(x.sizes(), x.options()), grad_gate = at::empty(x.sizes(), x.options());
  const Tensor grad_weight = backward_into_cuda(grad_out, x, gate, weight, eps, activation, grad_x, grad_gate);
  return {grad_x, grad_gate, grad_weight};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("gated_rms_norm", forward_cuda);
  m.impl("gated_rms_norm_backward", backward_cuda);
  m.impl("gated_rms_norm_backward.into", backward_into_cuda);
}

}  // namespace
}  // namespace sluice
