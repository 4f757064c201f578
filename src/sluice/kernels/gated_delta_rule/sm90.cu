// SPDX-License-Identifier: Apache-2.0
// The launchers of params.h: what runs in which order, and where intermediate results lie.
#include <algorithm>

#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice {
namespace sm90 {

// A whole number of rounds of `gradients`, whose items are a chunk and key head, over 132 multiprocessors. A pack whose
// walks are more than fit at once needs longer segments, for enough of them.
int segment_chunks(const GatedDeltaParams& params) {
  int multiprocessors = 0;
  const bool few = multiprocessor_count(multiprocessors) != cudaSuccess || split_values(params, multiprocessors);
  return few ? 132 : 528;
}

Workspace make_workspace(const GatedDeltaParams& params, int segment_chunks, bool backward) {
  Workspace workspace{};
  const int all_chunks = std::max(chunk_bound(params), 1);
  workspace.segment_chunks = std::min(segment_chunks, all_chunks);
  workspace.segments = (all_chunks + workspace.segment_chunks - 1) / workspace.segment_chunks;
  size_t used = 0;
  const auto take = [&]<class T>(T*& pointer, size_t count) {
    pointer = reinterpret_cast<T*>(static_cast<char*>(params.workspace) + used);
    used += (count * sizeof(T) + 1023) / 1024 * 1024;
  };
  const size_t chunks = workspace.segment_chunks, blocks = chunks * params.value_heads;
  take(workspace.first_chunk, params.sequences + 1);
  take(workspace.chunk_rows, all_chunks);
  take(workspace.segment_sequences, workspace.segments);
  const size_t place = used;
  take(workspace.inverse, blocks * kChunk * kChunk);
  take(workspace.scores, blocks * kChunk * kChunk);
  take(workspace.factors, blocks * kFactors * kChunk);
  take(workspace.norms, chunks * params.key_heads * 2 * kChunk);
  workspace.place_bytes = used - place;
  if (workspace.segments > 1) used += workspace.place_bytes;
  if (backward) {
    take(workspace.error, blocks * kChunk * kHeadDim);
    take(workspace.state, blocks * kHeadDim * kHeadDim);
    take(workspace.state_grad, blocks * kHeadDim * kHeadDim);
    take(workspace.carry, size_t{2} * params.value_heads * kHeadDim * kHeadDim);
  }
  workspace.bytes = used;
  return workspace;
}

Workspace with_segment(Workspace workspace, int segment) {
  const size_t bytes = segment % 2 * workspace.place_bytes;
  const auto shift = [bytes]<class T>(T*& pointer) {
    pointer = reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
  };
  shift(workspace.inverse);
  shift(workspace.scores);
  shift(workspace.factors);
  shift(workspace.norms);
  workspace.segment = segment;
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

int32_t gated_delta_rule_checkpoints(const GatedDeltaParams& params) {
  return (std::max(sm90::chunk_bound(params), 1) - 1) / sm90::segment_chunks(params);
}
size_t gated_delta_rule_workspace_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::segment_chunks(params), false).bytes;
}
size_t gated_delta_rule_backward_workspace_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::segment_chunks(params), true).bytes;
}
size_t gated_delta_rule_prepared_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::chunk_bound(params), false).bytes;
}
size_t gated_delta_rule_backward_steps_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::chunk_bound(params), true).bytes;
}

cudaError_t launch_gated_delta_rule_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::segment_chunks(params), false);
  cudaError_t error = sm90::launch_index(params, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_prepare(params, workspace, 0, params.key_heads, false, stream);
  for (int segment = 0; segment < workspace.segments && error == cudaSuccess; ++segment) {
    error = sm90::launch_forward_walk<sm90::Walk::kOutput>(params, sm90::with_segment(workspace, segment), stream);
    if (error == cudaSuccess && segment + 1 < workspace.segments) {
      error =
          sm90::launch_prepare(params, sm90::with_segment(workspace, segment + 1), 0, params.key_heads, true, stream);
    }
  }
  return error;
}

cudaError_t launch_gated_delta_rule_backward_sm90(const GatedDeltaBackwardParams& params, cudaStream_t stream) {
  if (params.forward.sequences == 0) return cudaSuccess;
  const GatedDeltaParams& forward = params.forward;
  const sm90::Workspace workspace = sm90::make_workspace(forward, sm90::segment_chunks(forward), true);
  const int last = workspace.segments - 1, key_heads = forward.key_heads;
  cudaError_t error = sm90::launch_index(forward, workspace, stream);
  if (error == cudaSuccess)
    error = sm90::launch_prepare(forward, sm90::with_segment(workspace, last), 0, key_heads, false, stream);
  for (int segment = last; segment >= 0 && error == cudaSuccess; --segment) {
    const sm90::Workspace here = sm90::with_segment(workspace, segment);
    // The next segment is prepared beside the walks, half of the key heads beside each.
    const auto prepare_next = [&](int first, int end) {
      if (error == cudaSuccess && segment > 0 && first < end)
        error = sm90::launch_prepare(forward, sm90::with_segment(workspace, segment - 1), first, end, true, stream);
    };
    error = sm90::launch_forward_walk<sm90::Walk::kStates>(forward, here, stream);
    prepare_next(0, key_heads / 2);
    if (error == cudaSuccess) error = sm90::launch_backward_walk(params, here, stream);
    prepare_next(key_heads / 2, key_heads);
    if (error == cudaSuccess) error = sm90::launch_gradients(params, here, stream);
  }
  return error;
}

// The backward pass's workspace begins as the forward pass's.
cudaError_t launch_gated_delta_rule_prepare_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::chunk_bound(params), false);
  const cudaError_t error = sm90::launch_index(params, workspace, stream);
  return error == cudaSuccess ? sm90::launch_prepare(params, workspace, 0, params.key_heads, false, stream) : error;
}

cudaError_t launch_gated_delta_rule_prepared_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::chunk_bound(params), false);
  return sm90::launch_forward_walk<sm90::Walk::kOutput>(params, workspace, stream);
}

cudaError_t launch_gated_delta_rule_backward_step_sm90(const GatedDeltaBackwardParams& params, BackwardStep step,
                                                       cudaStream_t stream) {
  const GatedDeltaParams& forward = params.forward;
  if (forward.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(forward, sm90::chunk_bound(forward), true);
  switch (step) {
    case BackwardStep::kStates:
      return sm90::launch_forward_walk<sm90::Walk::kStates>(forward, workspace, stream);
    case BackwardStep::kStateGradients:
      return sm90::launch_backward_walk(params, workspace, stream);
    case BackwardStep::kGradients:
      return sm90::launch_gradients(params, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sluice
