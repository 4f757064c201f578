// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code: what the Hopper kernels need, as plain pointers and sizes.
// T packed tokens, n sequences, Hk key heads, Hv value heads (Hv % Hk == 0), K key dim, V value dim.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sluice {

struct GatedDeltaParams {
  const __nv_bfloat16* q;      // [T, Hk, K]
  const __nv_bfloat16* k;      // [T, Hk, K]
  const __nv_bfloat16* v;      // [T, Hv, V]
  const float* g;              // [T, Hv], log decay, <= 0
  const float* beta;           // [T, Hv]
  const int32_t* cu_seqlens;   // [n + 1]
  const float* initial_state;  // [n, Hv, K, V], or null for zeros
  int32_t tokens, sequences, key_heads, value_heads, key_dim, value_dim;
  int64_t q_stride, k_stride, v_stride;  // elements between tokens; within a token the heads are dense
  float scale;
  bool qk_l2norm;   // q and k are divided by sqrt(sum of squares + 1e-6) first
  void* workspace;  // gated_delta_rule_workspace_bytes, aligned to 1024 bytes
  // [gated_delta_rule_checkpoints, Hv, K, V]: states inside long sequences, and with few heads what a piece of the
  // tokens makes of the state before it; written by the forward pass and read by the backward pass, both of which work
  // on a segment of the tokens at a time
  float* checkpoints;

  __nv_bfloat16* out;  // [T, Hv, V]
  float* final_state;  // [n, Hv, K, V], or null when not wanted
};

struct GatedDeltaBackwardParams {
  GatedDeltaParams forward;       // its out and final_state are not used; workspace of the backward's size
  const __nv_bfloat16* grad_out;  // [T, Hv, V]
  const float* grad_final_state;  // [n, Hv, K, V], or null for zeros
  int64_t grad_out_stride, grad_q_stride, grad_k_stride, grad_v_stride;  // elements between tokens, as q_stride

  __nv_bfloat16* grad_q;      // [T, Hk, K], may be q itself
  __nv_bfloat16* grad_k;      // [T, Hk, K], may be k itself
  __nv_bfloat16* grad_v;      // [T, Hv, V], may be v itself
  float* grad_g;              // [T, Hv]
  float* grad_beta;           // [T, Hv]
  float* grad_initial_state;  // [n, Hv, K, V], or null when not wanted
};

// A few tokens of each sequence, whose states are read and written in place.
struct GatedDeltaCachedParams {
  GatedDeltaParams rule;  // without initial_state, workspace, checkpoints and final_state
  const int64_t* slots;   // [n]
  float* states;          // [.., Hv, K, V]
};

// Empty when the Hopper kernels can run it, otherwise what stands in the way.
std::string_view why_unsupported(const GatedDeltaParams& params);

// Of the current device.
int32_t gated_delta_rule_checkpoints(const GatedDeltaParams& params);
size_t gated_delta_rule_workspace_bytes(const GatedDeltaParams& params);
size_t gated_delta_rule_backward_workspace_bytes(const GatedDeltaParams& params);
size_t gated_delta_rule_prepared_bytes(const GatedDeltaParams& params);
size_t gated_delta_rule_backward_steps_bytes(const GatedDeltaParams& params);

cudaError_t launch_gated_delta_rule_sm90(const GatedDeltaParams& params, cudaStream_t stream);
cudaError_t launch_gated_delta_rule_cached(const GatedDeltaCachedParams& params, cudaStream_t stream);
// `beside`: a stream of higher priority for what runs beside `stream`, in whose order the whole is.
cudaError_t launch_gated_delta_rule_backward_sm90(const GatedDeltaBackwardParams& params, cudaStream_t stream,
                                                  cudaStream_t beside);

// The passes over all tokens at once, step by step, each of which leaves in the workspace what later ones need;
// `checkpoints` is not used. Of both passes the first step, which does not read v; of the forward pass the second, in a
// workspace of gated_delta_rule_prepared_bytes; those of the backward pass after the first, in one of
// gated_delta_rule_backward_steps_bytes.
cudaError_t launch_gated_delta_rule_prepare_sm90(const GatedDeltaParams& params, cudaStream_t stream);
cudaError_t launch_gated_delta_rule_prepared_sm90(const GatedDeltaParams& params, cudaStream_t stream);
enum class BackwardStep {
  kStates,          // reads v
  kStateGradients,  // reads grad_final_state; writes grad_v and grad_initial_state. May be repeated
  kGradients,       // after both; reads grad_v, writes the others
};
cudaError_t launch_gated_delta_rule_backward_step_sm90(const GatedDeltaBackwardParams& params, BackwardStep step,
                                                       cudaStream_t stream);

}  // namespace sluice
