// SPDX-License-Identifier: Apache-2.0
// The gated delta rule on CUDA tensors: from tensors to params to launch.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/gated_delta_rule/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "gated_delta_rule";

using Optional = const std::optional<Tensor>&;

void check_shape(const char* name, const Tensor& x, at::IntArrayRef shape, at::ScalarType type, const Tensor& q) {
  SLUICE_CHECK(x.sizes() == shape && x.scalar_type() == type && x.device() == q.device(),
               "gated_delta_rule: {} must be {} {} on {}, as q {} asks; got {} on {}", name, c10::str(shape),
               c10::toString(type), q.device().str(), describe(q), describe(x), x.device().str());
}

// What the params point into: inputs in the layout that the kernels read. Held until the launch.
struct Inputs {
  Tensor q, k, v, g, beta, cu_seqlens, initial_state;
};

Inputs make_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                   const Tensor& cu_seqlens, Optional initial_state) {
  SLUICE_CHECK(
      q.dim() == 3 && v.dim() == 3 && q.scalar_type() == kBFloat16 && q.size(1) > 0 && v.size(1) % q.size(1) == 0,
      "gated_delta_rule: on a GPU q must be bfloat16 [T, Hk, K] and v [T, Hv, V], Hv a multiple of Hk; got q {}, v {}",
      describe(q), describe(v));
  const std::int64_t tokens = q.size(0), sequences = cu_seqlens.numel() - 1;
  check_shape("k", k, q.sizes(), kBFloat16, q);
  check_shape("v", v, {tokens, v.size(1), v.size(2)}, kBFloat16, q);
  check_shape("g", g, {tokens, v.size(1)}, kFloat, q);
  check_shape("beta", beta, {tokens, v.size(1)}, kFloat, q);
  check_shape("cu_seqlens", cu_seqlens, {std::max<std::int64_t>(sequences, 0) + 1}, kInt, q);
  if (initial_state)
    check_shape("initial_state", *initial_state, {sequences, v.size(1), q.size(2), v.size(2)}, kFloat, q);
  return {dense_heads(q),
          dense_heads(k),
          dense_heads(v),
          g.contiguous(),
          beta.contiguous(),
          cu_seqlens.contiguous(),
          initial_state ? initial_state->contiguous() : Tensor()};
}

GatedDeltaParams make_params(const Inputs& x, double scale, bool qk_l2norm) {
  SLUICE_CHECK(x.v.numel() <= std::numeric_limits<std::int32_t>::max() * std::int64_t{128},
               "gated_delta_rule: too many tokens in one pack: v is {}; split it", describe(x.v));
  GatedDeltaParams params{};
  params.q = bf16_data(x.q);
  params.k = bf16_data(x.k);
  params.v = bf16_data(x.v);
  params.g = x.g.const_data_ptr<float>();
  params.beta = x.beta.const_data_ptr<float>();
  params.cu_seqlens = x.cu_seqlens.const_data_ptr<std::int32_t>();
  params.initial_state = x.initial_state.defined() ? x.initial_state.const_data_ptr<float>() : nullptr;
  params.tokens = static_cast<std::int32_t>(x.q.size(0));
  params.sequences = static_cast<std::int32_t>(x.cu_seqlens.size(0) - 1);
  params.key_heads = static_cast<std::int32_t>(x.q.size(1));
  params.value_heads = static_cast<std::int32_t>(x.v.size(1));
  params.key_dim = static_cast<std::int32_t>(x.q.size(2));
  params.value_dim = static_cast<std::int32_t>(x.v.size(2));
  params.q_stride = x.q.stride(0);
  params.k_stride = x.k.stride(0);
  params.v_stride = x.v.stride(0);
  params.scale = static_cast<float>(scale);
  params.qk_l2norm = qk_l2norm;
  const auto reason = why_unsupported(params);
  SLUICE_CHECK(reason.empty(), "gated_delta_rule: the GPU kernels cannot run q {}, v {}: {}", describe(x.q),
               describe(x.v), reason);
  return params;
}

// Where the params write.
struct Outputs {
  Tensor out, final_state;  // the latter without sequences where it is not wanted
};
Outputs make_outputs(GatedDeltaParams& params, const Inputs& x, bool output_final_state) {
  Outputs outputs{.out = at::empty(x.v.sizes(), x.v.options()),
                  .final_state = at::empty(
                      {output_final_state ? params.sequences : 0, params.value_heads, params.key_dim, params.value_dim},
                      x.g.options())};
  params.out = mutable_bf16_data(outputs.out);
  params.final_state = output_final_state ? outputs.final_state.mutable_data_ptr<float>() : nullptr;
  return outputs;
}

Tensor workspace(size_t bytes, const Tensor& like) {
  return at::empty({static_cast<std::int64_t>(bytes)}, like.options().dtype(at::kByte));
}

std::tuple<Tensor, Tensor, Tensor> gated_delta_rule_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                                         Optional initial_state, double scale, bool qk_l2norm,
                                                         bool output_final_state) {
  const c10::cuda::CUDAGuard device(q.device());
  const Inputs inputs = make_inputs(q, k, v, g, beta, cu_seqlens, initial_state);
  GatedDeltaParams params = make_params(inputs, scale, qk_l2norm);
  const auto [out, final_state] = make_outputs(params, inputs, output_final_state);
  const Tensor checkpoints =
      at::empty({gated_delta_rule_checkpoints(params), v.size(1), q.size(2), v.size(2)}, g.options());
  params.checkpoints = checkpoints.mutable_data_ptr<float>();
  const Tensor scratch = workspace(gated_delta_rule_workspace_bytes(params), q);
  params.workspace = scratch.mutable_data_ptr();
  check_launch(kOp, launch_gated_delta_rule_sm90(params, c10::cuda::getCurrentCUDAStream()));
  return {out, final_state, checkpoints};
}

Tensor prepare_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                    const Tensor& cu_seqlens, double scale, bool qk_l2norm) {
  const c10::cuda::CUDAGuard device(q.device());
  const Inputs inputs = make_inputs(q, k, v, g, beta, cu_seqlens, std::nullopt);
  GatedDeltaParams params = make_params(inputs, scale, qk_l2norm);
  const Tensor prepared = workspace(gated_delta_rule_prepared_bytes(params), q);
  params.workspace = prepared.mutable_data_ptr();
  check_launch(kOp, launch_gated_delta_rule_prepare_sm90(params, c10::cuda::getCurrentCUDAStream()));
  return prepared;
}

std::tuple<Tensor, Tensor> prepared_cuda(const Tensor& prepared, const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                         Optional initial_state, double scale, bool qk_l2norm,
                                         bool output_final_state) {
  const c10::cuda::CUDAGuard device(q.device());
  const Inputs inputs = make_inputs(q, k, v, g, beta, cu_seqlens, initial_state);
  GatedDeltaParams params = make_params(inputs, scale, qk_l2norm);
  const auto bytes = static_cast<std::int64_t>(gated_delta_rule_prepared_bytes(params));
  SLUICE_CHECK(prepared.numel() == bytes && prepared.scalar_type() == at::kByte && prepared.device() == q.device(),
               "gated_delta_rule.prepared: prepared must be what gated_delta_rule.prepare gave for these q and k, {} "
               "bytes on {}; got {}",
               bytes, q.device().str(), describe(prepared));
  const auto [out, final_state] = make_outputs(params, inputs, output_final_state);
  params.workspace = prepared.mutable_data_ptr();
  check_launch(kOp, launch_gated_delta_rule_prepared_sm90(params, c10::cuda::getCurrentCUDAStream()));
  return {out, final_state};
}

Tensor cached_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                   const Tensor& cu_seqlens, const Tensor& slots, Tensor& states, double scale, bool qk_l2norm) {
  const c10::cuda::CUDAGuard device(q.device());
  const Inputs inputs = make_inputs(q, k, v, g, beta, cu_seqlens, std::nullopt);
  GatedDeltaCachedParams params{};
  params.rule = make_params(inputs, scale, qk_l2norm);
  check_shape("slots", slots, {params.rule.sequences}, kLong, q);
  check_shape("states", states, {states.size(0), v.size(1), q.size(2), v.size(2)}, kFloat, q);
  SLUICE_CHECK(states.is_contiguous() && slots.is_contiguous(), "gated_delta_rule: states and slots must be dense");
  const Tensor out = at::empty(v.sizes(), v.options());
  params.rule.out = mutable_bf16_data(out);
  params.slots = slots.const_data_ptr<std::int64_t>();
  params.states = states.mutable_data_ptr<float>();
  check_launch(kOp, launch_gated_delta_rule_cached(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

void check_gradient(const char* name, const Tensor& grad, const Tensor& x) {
  check_shape(name, grad, x.sizes(), kBFloat16, x);
  SLUICE_CHECK(has_dense_heads(grad),
               "gated_delta_rule_backward: {} {} must have dense heads and rows that start at multiples of 16 bytes",
               name, describe(grad));
}

// A backward pass's params, without its outputs, and what they point into.
struct Backward {
  Inputs inputs;
  Tensor grad_out, grad_final_state, workspace;
  GatedDeltaBackwardParams params{};

  std::vector<int64_t> state_shape() const {
    const GatedDeltaParams& x = params.forward;
    return {x.sequences, x.value_heads, x.key_dim, x.value_dim};
  }
};

Backward make_backward(const Tensor& grad_out, Optional grad_final_state, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                       Optional initial_state, double scale, bool qk_l2norm) {
  Backward pass{.inputs = make_inputs(q, k, v, g, beta, cu_seqlens, initial_state),
                .grad_out = {},
                .grad_final_state = {},
                .workspace = {}};
  pass.params.forward = make_params(pass.inputs, scale, qk_l2norm);
  check_shape("grad_out", grad_out, v.sizes(), kBFloat16, q);
  pass.grad_out = dense_heads(grad_out);
  pass.params.grad_out = bf16_data(pass.grad_out);
  pass.params.grad_out_stride = pass.grad_out.stride(0);
  if (grad_final_state) {
    check_shape("grad_final_state", *grad_final_state, pass.state_shape(), kFloat, q);
    pass.grad_final_state = grad_final_state->contiguous();
    pass.params.grad_final_state = pass.grad_final_state.const_data_ptr<float>();
  }
  return pass;
}

// Where the gradients go; those of g and beta are given back.
std::tuple<Tensor, Tensor> set_gradients(Backward& pass, Tensor& grad_q, Tensor& grad_k, Tensor& grad_v) {
  const Inputs& x = pass.inputs;
  check_gradient("grad_q", grad_q, x.q);
  check_gradient("grad_k", grad_k, x.k);
  check_gradient("grad_v", grad_v, x.v);
  const Tensor grad_g = at::empty(x.g.sizes(), x.g.options()), grad_beta = at::empty(x.beta.sizes(), x.beta.options());
  GatedDeltaBackwardParams& params = pass.params;
  params.grad_q_stride = grad_q.stride(0);
  params.grad_k_stride = grad_k.stride(0);
  params.grad_v_stride = grad_v.stride(0);
  params.grad_q = mutable_bf16_data(grad_q);
  params.grad_k = mutable_bf16_data(grad_k);
  params.grad_v = mutable_bf16_data(grad_v);
  params.grad_g = grad_g.mutable_data_ptr<float>();
  params.grad_beta = grad_beta.mutable_data_ptr<float>();
  return {grad_g, grad_beta};
}

std::tuple<Tensor, Tensor, Tensor> backward_into_cuda(const Tensor& grad_out, Optional grad_final_state,
                                                      const Tensor& q, const Tensor& k, const Tensor& v,
                                                      const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                                      Optional initial_state, const Tensor& checkpoints, double scale,
                                                      bool qk_l2norm, Tensor& grad_q, Tensor& grad_k, Tensor& grad_v) {
  const c10::cuda::CUDAGuard device(q.device());
  Backward pass =
      make_backward(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm);
  const auto [grad_g, grad_beta] = set_gradients(pass, grad_q, grad_k, grad_v);
  GatedDeltaBackwardParams& params = pass.params;
  check_shape("checkpoints", checkpoints,
              {gated_delta_rule_checkpoints(params.forward), v.size(1), q.size(2), v.size(2)}, kFloat, q);
  params.forward.checkpoints = const_cast<float*>(checkpoints.const_data_ptr<float>());  // only read
  // Without an initial state nobody asks for its gradient: zeros that take no memory stand in for it.
  const Tensor grad_initial_state = initial_state ? at::empty(pass.state_shape(), g.options())
                                                  : at::zeros({}, g.options()).expand(pass.state_shape());
  if (initial_state) params.grad_initial_state = grad_initial_state.mutable_data_ptr<float>();
  pass.workspace = workspace(gated_delta_rule_backward_workspace_bytes(params.forward), q);
  params.forward.workspace = pass.workspace.mutable_data_ptr();
  check_launch(kOp, launch_gated_delta_rule_backward_sm90(params, c10::cuda::getCurrentCUDAStream(),
                                                          c10::cuda::getStreamFromPool(/*isHighPriority=*/true)));
  return {grad_g, grad_beta, grad_initial_state};
}

void launch_step(const Backward& pass, BackwardStep step) {
  check_launch(kOp, launch_gated_delta_rule_backward_step_sm90(pass.params, step, c10::cuda::getCurrentCUDAStream()));
}

// Keeps the workspace and, from zero, the gradient of v: its place may be that of v, which the states are to be worked
// out of yet.
std::tuple<Tensor, std::vector<Tensor>> begin_backward_cuda(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor& g, const Tensor& beta,
                                                            const Tensor& cu_seqlens, Optional initial_state,
                                                            double scale, bool qk_l2norm, bool from_zero) {
  const c10::cuda::CUDAGuard device(q.device());
  Backward pass = make_backward(grad_out, std::nullopt, q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm);
  GatedDeltaBackwardParams& params = pass.params;
  pass.workspace = workspace(gated_delta_rule_backward_steps_bytes(params.forward), q);
  params.forward.workspace = pass.workspace.mutable_data_ptr();
  check_launch(kOp, launch_gated_delta_rule_prepare_sm90(params.forward, c10::cuda::getCurrentCUDAStream()));
  if (!from_zero) {
    launch_step(pass, BackwardStep::kStates);
    return {at::empty({0}, g.options()), {pass.workspace}};
  }
  const Tensor grad_initial_state = at::empty(pass.state_shape(), g.options());
  const Tensor grad_v = at::empty(v.sizes(), v.options());
  params.grad_initial_state = grad_initial_state.mutable_data_ptr<float>();
  params.grad_v = mutable_bf16_data(grad_v);
  params.grad_v_stride = grad_v.stride(0);
  launch_step(pass, BackwardStep::kStateGradients);
  return {grad_initial_state, {pass.workspace, grad_v}};
}

std::tuple<Tensor, Tensor> finish_backward_cuda(at::TensorList kept, Optional grad_final_state, const Tensor& grad_out,
                                                const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                const Tensor& beta, const Tensor& cu_seqlens, Optional initial_state,
                                                double scale, bool qk_l2norm, Tensor& grad_q, Tensor& grad_k,
                                                Tensor& grad_v) {
  const c10::cuda::CUDAGuard device(q.device());
  Backward pass =
      make_backward(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm);
  const auto result = set_gradients(pass, grad_q, grad_k, grad_v);
  const auto bytes = static_cast<std::int64_t>(gated_delta_rule_backward_steps_bytes(pass.params.forward));
  const bool from_zero = kept.size() == 2;
  SLUICE_CHECK(kept.size() == 1 || from_zero,
               "gated_delta_rule_backward.finish: kept must be the one or two tensors of "
               "gated_delta_rule_backward.begin; got {}",
               kept.size());
  check_shape("kept[0]", kept[0], {bytes}, at::kByte, q);
  if (from_zero) check_shape("kept[1]", kept[1], v.sizes(), kBFloat16, q);
  pass.workspace = kept[0].contiguous();
  pass.params.forward.workspace = pass.workspace.mutable_data_ptr();
  if (from_zero) launch_step(pass, BackwardStep::kStates);
  if (from_zero && !grad_final_state) {
    grad_v.view(at::kComplexDouble).copy_(kept[1].view(at::kComplexDouble));  // 16 bytes a thread
  } else {
    launch_step(pass, BackwardStep::kStateGradients);
  }
  launch_step(pass, BackwardStep::kGradients);
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_cuda(
    const Tensor& grad_out, Optional grad_final_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens, Optional initial_state, const Tensor& checkpoints,
    double scale, bool qk_l2norm) {
  Tensor grad_q = at::empty(q.sizes(), q.options()), grad_k = at::empty(k.sizes(), k.options());
  Tensor grad_v = at::empty(v.sizes(), v.options());
  auto [grad_g, grad_beta, grad_initial_state] =
      backward_into_cuda(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, initial_state, checkpoints, scale,
                         qk_l2norm, grad_q, grad_k, grad_v);
  return {grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("gated_delta_rule", gated_delta_rule_cuda);
  m.impl("gated_delta_rule.cached", cached_cuda);
  m.impl("gated_delta_rule.prepare", prepare_cuda);
  m.impl("gated_delta_rule.prepared", prepared_cuda);
  m.impl("gated_delta_rule_backward", backward_cuda);
  m.impl("gated_delta_rule_backward.into", backward_into_cuda);
  m.impl("gated_delta_rule_backward.begin", begin_backward_cuda);
  m.impl("gated_delta_rule_backward.finish", finish_backward_cuda);
}

}  // namespace
}  // namespace sluice
