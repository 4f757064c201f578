// SPDX-License-Identifier: Apache-2.0
// The convolution on CUDA tensors: from tensors to params to launch.
#include <cstdint>
#include <limits>
#include <tuple>

#include "sluice/kernels/causal_conv/params.h"
#include "sluice/kernels/common/launch.h"

namespace sluice {
namespace {

constexpr auto kOp = "causal_conv";

using Optional = const std::optional<Tensor>&;

ConvType conv_type(const Tensor& x) {
  SLUICE_CHECK(x.scalar_type() == kFloat || x.scalar_type() == kBFloat16,
               "causal_conv: on a GPU x and weight must be float32 or bfloat16; got {}", describe(x));
  return x.scalar_type() == kFloat ? ConvType::kFp32 : ConvType::kBf16;
}

// What the params point into. Held until the launch.
struct Inputs {
  Tensor x, weight, cu_seqlens, initial_state;
};

Inputs make_inputs(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state) {
  SLUICE_CHECK(x.dim() == 2 && weight.dim() == 3 && weight.size(2) == 4 && weight.size(0) == x.size(1),
               "causal_conv: on a GPU x must be [T, C] and weight [C, 1, 4]; got x {}, weight {}", describe(x),
               describe(weight));
  SLUICE_CHECK(x.size(0) <= std::numeric_limits<std::int32_t>::max() && weight.device() == x.device() &&
                   cu_seqlens.device() == x.device() && (!initial_state || initial_state->device() == x.device()),
               "causal_conv: weight, cu_seqlens and initial_state must be on the device of x, {}", x.device().str());
  SLUICE_CHECK(x.size(0) == 0 || cu_seqlens.numel() > 1, "causal_conv: x {} has tokens, cu_seqlens no sequence",
               describe(x));
  auto taps = weight.contiguous();
  if (reinterpret_cast<std::uintptr_t>(taps.const_data_ptr()) % (4 * taps.element_size()) != 0) taps = taps.clone();
  return {with_dense_rows(x), taps, cu_seqlens.contiguous(), initial_state ? initial_state->contiguous() : Tensor()};
}

CausalConvParams make_params(const Inputs& in, bool silu) {
  CausalConvParams params{};
  params.x = in.x.const_data_ptr();
  params.weight = in.weight.const_data_ptr();
  params.cu_seqlens = in.cu_seqlens.const_data_ptr<std::int32_t>();
  params.initial_state = in.initial_state.defined() ? in.initial_state.const_data_ptr() : nullptr;
  params.tokens = static_cast<std::int32_t>(in.x.size(0));
  params.channels = static_cast<std::int32_t>(in.x.size(1));
  params.sequences = static_cast<std::int32_t>(in.cu_seqlens.numel() - 1);
  params.x_stride = in.x.stride(0);
  params.type = conv_type(in.x);
  params.weight_type = conv_type(in.weight);
  params.silu = silu;
  return params;
}

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                        Optional initial_state, bool silu) {
  const c10::cuda::CUDAGuard device(x.device());
  const Inputs inputs = make_inputs(x, weight, cu_seqlens, initial_state);
  CausalConvParams params = make_params(inputs, silu);
  const Tensor out = at::empty(x.sizes(), x.options());
  const Tensor final_state = at::empty({params.sequences, x.size(1), 3}, x.options());
  params.out = out.mutable_data_ptr();
  params.final_state = final_state.mutable_data_ptr();
  check_launch(kOp, launch_causal_conv(params, c10::cuda::getCurrentCUDAStream()));
  return {out, final_state};
}

Tensor cached_cuda(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens, const Tensor& slots, Tensor& states,
                   bool silu) {
  const c10::cuda::CUDAGuard device(x.device());
  const Inputs inputs = make_inputs(x, weight, cu_seqlens, std::nullopt);
  CausalConvCachedParams params{};
  params.conv = make_params(inputs, silu);
  SLUICE_CHECK(slots.scalar_type() == kLong && slots.numel() == params.conv.sequences && slots.is_contiguous() &&
                   states.is_contiguous() && states.scalar_type() == x.scalar_type() && states.dim() == 3 &&
                   states.size(1) == x.size(1) && states.size(2) == 3,
               "causal_conv: slots must be int64 [{}] and states [S, {}, 3] in the dtype of x, both dense; got {}, {}",
               params.conv.sequences, x.size(1), describe(slots), describe(states));
  check_device(kOp, "slots", slots, x);
  check_device(kOp, "states", states, x);
  const Tensor out = at::empty(x.sizes(), x.options());
  params.conv.out = out.mutable_data_ptr();
  params.slots = slots.const_data_ptr<std::int64_t>();
  params.states = states.mutable_data_ptr();
  check_launch(kOp, launch_causal_conv_cached(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> backward_into_cuda(const Tensor& grad_out, Optional grad_final_state, const Tensor& x,
                                              const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state,
                                              bool silu, Tensor& grad_x) {
  const c10::cuda::CUDAGuard device(x.device());
  const Inputs inputs = make_inputs(x, weight, cu_seqlens, initial_state);
  CausalConvBackwardParams params{};
  params.forward = make_params(inputs, silu);
  SLUICE_CHECK(grad_out.sizes() == x.sizes() && grad_out.scalar_type() == x.scalar_type() &&
                   grad_x.sizes() == x.sizes() && grad_x.scalar_type() == x.scalar_type() && grad_x.stride(1) == 1,
               "causal_conv_backward: grad_out and grad_x must have the shape and dtype of x, {}; got {}, {}",
               describe(x), describe(grad_out), describe(grad_x));
  const Tensor rows = with_dense_rows(grad_out);
  const Tensor kept = grad_final_state ? grad_final_state->contiguous() : Tensor();
  const std::vector<std::int64_t> state_shape{params.forward.sequences, x.size(1), 3};
  params.grad_out = rows.const_data_ptr();
  params.grad_out_stride = rows.stride(0);
  params.grad_final_state = kept.defined() ? kept.const_data_ptr() : nullptr;
  params.grad_x = grad_x.mutable_data_ptr();
  params.grad_x_stride = grad_x.stride(0);
  const Tensor partial =
      at::empty({causal_conv_strips(params.forward.tokens), 4, x.size(1)}, x.options().dtype(kFloat));
  params.partial = partial.mutable_data_ptr<float>();
  const bool in_place = grad_x.const_data_ptr() == inputs.x.const_data_ptr();
  const Tensor halo = at::empty({in_place ? partial.size(0) : 0, 6, x.size(1)}, x.options());
  params.halo = in_place ? halo.mutable_data_ptr() : nullptr;
  const Tensor grad_weight = at::empty(weight.sizes(), weight.options());
  params.grad_weight = grad_weight.mutable_data_ptr();
  // Without an initial state nobody asks for its gradient: zeros that take no memory stand in for it.
  const Tensor grad_initial_state =
      initial_state ? at::empty(state_shape, x.options()) : at::zeros({}, x.options()).expand(state_shape);
  if (initial_state) params.grad_initial_state = grad_initial_state.mutable_data_ptr();
  check_launch(kOp, launch_causal_conv_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_weight, grad_initial_state};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_out, Optional grad_final_state, const Tensor& x,
                                                 const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state,
                                                 bool silu) {
  Tensor grad_x = at::empty(x.sizes(), x.options());
  auto [grad_weight, grad_initial_state] =
      backward_into_cuda(grad_out, grad_final_state, x, weight, cu_seqlens, initial_state, silu, grad_x);
  return {grad_x, grad_weight, grad_initial_state};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("causal_conv", forward_cuda);
  m.impl("causal_conv.cached", cached_cuda);
  m.impl("causal_conv_backward", backward_cuda);
  m.impl("causal_conv_backward.into", backward_into_cuda);
}

}  // namespace
}  // namespace sluice
