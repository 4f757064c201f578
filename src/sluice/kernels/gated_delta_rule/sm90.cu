// SPDX-License-Identifier: Apache-2.0
// The launchers of params.h: what runs in which order, and where intermediate results lie.
#include "sluice/kernels/gated_delta_rule/sm90.cuh"

namespace sluice {
namespace sm90 {

Workspace make_workspace(const GatedDeltaParams& params, bool backward) {
  Workspace workspace{};
  size_t used = 0;
  const auto take = [&]<class T>(T*& pointer, size_t count) {
    pointer = reinterpret_cast<T*>(static_cast<char*>(params.workspace) + used);
    used += (count * sizeof(T) + 1023) / 1024 * 1024;
  };
  const size_t chunks = chunk_bound(params), blocks = chunks * params.value_heads;
  take(workspace.first_chunk, params.sequences + 1);
  take(workspace.chunk_rows, chunks);
  take(workspace.inverse, blocks * kChunk * kChunk);
  take(workspace.scores, blocks * kChunk * kChunk);
  take(workspace.factors, blocks * kFactors * kChunk);
  take(workspace.norms, chunks * params.key_heads * 2 * kChunk);
  if (backward) {
    take(workspace.error, static_cast<size_t>(params.tokens) * params.value_heads * kHeadDim);
    take(workspace.state, blocks * kHeadDim * kHeadDim);
    take(workspace.state_grad, blocks * kHeadDim * kHeadDim);
  }
  workspace.bytes = used;
  return workspace;
}

}  // namespace sm90

std::string_view why_unsupported(const GatedDeltaParams& params) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (params.key_dim != sm90::kHeadDim || params.value_dim != sm90::kHeadDim)
    return "key and value head dims must be 128";
  if (params.q_stride % 8 != 0 || params.k_stride % 8 != 0 || params.v_stride % 8 != 0 || !aligned(params.q) ||
      !aligned(params.k) || !aligned(params.v)) {
    return "rows of q, k and v must start at multiples of 16 bytes";
  }
  return {};
}

size_t gated_delta_rule_workspace_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, false).bytes;
}
size_t gated_delta_rule_backward_workspace_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, true).bytes;
}

cudaError_t launch_gated_delta_rule_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, false);
  if (const cudaError_t error = sm90::launch_prepare(params, workspace, stream); error != cudaSuccess) return error;
  return sm90::launch_forward_walk<sm90::Walk::kOutput>(params, workspace, stream);
}

cudaError_t launch_gated_delta_rule_backward_sm90(const GatedDeltaBackwardParams& params, cudaStream_t stream) {
  if (params.forward.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params.forward, true);
  if (const cudaError_t error = sm90::launch_prepare(params.forward, workspace, stream); error != cudaSuccess)
    return error;
  if (const cudaError_t error = sm90::launch_forward_walk<sm90::Walk::kStates>(params.forward, workspace, stream);
      error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error = sm90::launch_backward_walk(params, workspace, stream); error != cudaSuccess)
    return error;
  return sm90::launch_gradients(params, workspace, stream);
}

}  // namespace sluice
