// SPDX-License-Identifier: Apache-2.0
// The launchers of params.h: what runs in which order, and where intermediate results lie.
#include <algorithm>

#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice {
namespace sm90 {

// A whole number of rounds of `gradients`, whose items are a chunk and key head, over 132 multiprocessors. A pack whose
// walks are more than fit at once needs longer segments, for enough of them.
int segment_chunks(const GatedDeltaParams& params) { return split_values(params, multiprocessors()) ? 132 : 528; }

// Whether the multiprocessors that a segment's walks leave idle can work out the `gradients` of another in their time,
// with its `prepare`: a chunk's walks take 2.46 us whatever the heads, its gradients 6.15 us of one multiprocessor a
// value head, `prepare` 1.6 (H200). Up to 25 value heads of one sequence.
bool fits_beside_walks(const GatedDeltaParams& params) {
  const int all = multiprocessors();
  return split_values(params, all) && 2.46f * idle_in_walks(params, all) >= (6.15f + 1.6f) * params.value_heads;
}

Pass backward_pass(const GatedDeltaParams& params) {
  return fits_beside_walks(params) ? Pass::kBackwardBeside : Pass::kBackward;
}

Workspace make_workspace(const GatedDeltaParams& params, int segment_chunks, Pass pass) {
  Workspace workspace{};
  const int all_chunks = std::max(chunk_bound(params), 1);
  workspace.segment_chunks = std::clamp(segment_chunks, 1, all_chunks);
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
  const bool beside = pass == Pass::kBackwardBeside;
  workspace.prepared_places = std::min(workspace.segments, beside ? 3 : 2);
  workspace.walked_places = std::min(workspace.segments, beside ? 2 : 1);
  const size_t prepared = used;
  take(workspace.inverse, blocks * kChunk * kChunk);
  take(workspace.scores, blocks * kChunk * kChunk);
  take(workspace.factors, blocks * kFactors * kChunk);
  take(workspace.norms, chunks * params.key_heads * 2 * kChunk);
  workspace.prepared_bytes = used - prepared;
  used += (workspace.prepared_places - 1) * workspace.prepared_bytes;
  if (pass != Pass::kForward) {
    const size_t walked = used;
    take(workspace.error, blocks * kChunk * kHeadDim);
    take(workspace.state, blocks * kHeadDim * kHeadDim);
    take(workspace.state_grad, blocks * kHeadDim * kHeadDim);
    workspace.walked_bytes = used - walked;
    used += (workspace.walked_places - 1) * workspace.walked_bytes;
    take(workspace.carry, size_t{2} * params.value_heads * kHeadDim * kHeadDim);
  }
  workspace.bytes = used;
  return workspace;
}

Workspace with_segment(Workspace workspace, int segment) {
  const auto shift = []<class T>(T*& pointer, size_t bytes) {
    pointer = reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
  };
  const size_t prepared = segment % workspace.prepared_places * workspace.prepared_bytes;
  const size_t walked = segment % workspace.walked_places * workspace.walked_bytes;
  shift(workspace.inverse, prepared);
  shift(workspace.scores, prepared);
  shift(workspace.factors, prepared);
  shift(workspace.norms, prepared);
  shift(workspace.error, walked);
  shift(workspace.state, walked);
  shift(workspace.state_grad, walked);
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
  return sm90::make_workspace(params, sm90::segment_chunks(params), sm90::Pass::kForward).bytes;
}
size_t gated_delta_rule_backward_workspace_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::segment_chunks(params), sm90::backward_pass(params)).bytes;
}
size_t gated_delta_rule_prepared_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::chunk_bound(params), sm90::Pass::kForward).bytes;
}
size_t gated_delta_rule_backward_steps_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::chunk_bound(params), sm90::Pass::kBackward).bytes;
}

cudaError_t launch_gated_delta_rule_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::segment_chunks(params), sm90::Pass::kForward);
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

namespace sm90 {
namespace {

// One kernel after the other, but for `prepare`.
cudaError_t launch_backward(const GatedDeltaBackwardParams& params, const Workspace& workspace, cudaStream_t stream) {
  const GatedDeltaParams& forward = params.forward;
  const int last = workspace.segments - 1, key_heads = forward.key_heads;
  cudaError_t error = launch_index(forward, workspace, stream);
  if (error == cudaSuccess) error = launch_prepare(forward, with_segment(workspace, last), 0, key_heads, false, stream);
  for (int segment = last; segment >= 0 && error == cudaSuccess; --segment) {
    const Workspace here = with_segment(workspace, segment);
    // The next segment is prepared beside the walks, half of the key heads beside each.
    const auto prepare_next = [&](int first, int end) {
      if (error == cudaSuccess && segment > 0 && first < end)
        error = launch_prepare(forward, with_segment(workspace, segment - 1), first, end, true, stream);
    };
    error = launch_forward_walk<Walk::kStates>(forward, here, stream);
    prepare_next(0, key_heads / 2);
    if (error == cudaSuccess) error = launch_backward_walk(params, here, stream);
    prepare_next(key_heads / 2, key_heads);
    if (error == cudaSuccess) error = launch_gradients(params, here, multiprocessors(), stream);
  }
  return error;
}

class Event {
 public:
  Event() { error_ = cudaEventCreateWithFlags(&event_, cudaEventDisableTiming); }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Event(const Event&) = delete;
  // What `from` has been given so far comes before what `to` will be given.
  cudaError_t order(cudaStream_t from, cudaStream_t to) {
    if (const cudaError_t error = record(from); error != cudaSuccess) return error;
    return wait(to);
  }
  cudaError_t record(cudaStream_t stream) { return error_ == cudaSuccess ? cudaEventRecord(event_, stream) : error_; }
  cudaError_t wait(cudaStream_t stream) { return cudaStreamWaitEvent(stream, event_); }

 private:
  cudaEvent_t event_ = nullptr;
  cudaError_t error_;
};

// `gradients` of a segment beside the walks along the next, which go through `walks`. A segment's places are used again
// by the third after it (prepared) and the second (walked), when its gradients are done.
cudaError_t launch_backward_beside(const GatedDeltaBackwardParams& params, const Workspace& workspace,
                                   cudaStream_t stream, cudaStream_t walks) {
  const GatedDeltaParams& forward = params.forward;
  const int last = workspace.segments - 1, key_heads = forward.key_heads, all = multiprocessors();
  Event walked, done[2];
  cudaError_t error = walked.order(stream, walks);
  const auto then = [&error](auto&& launch) {
    if (error == cudaSuccess) error = launch();
  };
  then([&] { return launch_index(forward, workspace, walks); });
  then([&] { return launch_prepare(forward, with_segment(workspace, last), 0, key_heads, false, walks); });
  for (int segment = last; segment >= 0 && error == cudaSuccess; --segment) {
    const Workspace here = with_segment(workspace, segment);
    if (segment + 2 <= last) then([&] { return done[segment % 2].wait(walks); });
    then([&] { return launch_forward_walk<Walk::kStates>(forward, here, walks); });
    then([&] { return launch_backward_walk(params, here, walks); });
    if (segment > 0) {
      then([&] { return launch_prepare(forward, with_segment(workspace, segment - 1), 0, key_heads, true, walks); });
    }
    then([&] { return walked.order(walks, stream); });
    then([&] { return launch_gradients(params, here, segment > 0 ? idle_in_walks(forward, all) : all, stream); });
    then([&] { return done[segment % 2].record(stream); });
  }
  return error;
}

}  // namespace
}  // namespace sm90

cudaError_t launch_gated_delta_rule_backward_sm90(const GatedDeltaBackwardParams& params, cudaStream_t stream,
                                                  cudaStream_t beside) {
  if (params.forward.sequences == 0) return cudaSuccess;
  const sm90::Pass pass = sm90::backward_pass(params.forward);
  const sm90::Workspace workspace = sm90::make_workspace(params.forward, sm90::segment_chunks(params.forward), pass);
  return pass == sm90::Pass::kBackwardBeside && workspace.segments > 1
             ? sm90::launch_backward_beside(params, workspace, stream, beside)
             : sm90::launch_backward(params, workspace, stream);
}

// The backward pass's workspace begins as the forward pass's.
cudaError_t launch_gated_delta_rule_prepare_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::chunk_bound(params), sm90::Pass::kForward);
  const cudaError_t error = sm90::launch_index(params, workspace, stream);
  return error == cudaSuccess ? sm90::launch_prepare(params, workspace, 0, params.key_heads, false, stream) : error;
}

cudaError_t launch_gated_delta_rule_prepared_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::chunk_bound(params), sm90::Pass::kForward);
  return sm90::launch_forward_walk<sm90::Walk::kOutput>(params, workspace, stream);
}

cudaError_t launch_gated_delta_rule_backward_step_sm90(const GatedDeltaBackwardParams& params, BackwardStep step,
                                                       cudaStream_t stream) {
  const GatedDeltaParams& forward = params.forward;
  if (forward.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(forward, sm90::chunk_bound(forward), sm90::Pass::kBackward);
  switch (step) {
    case BackwardStep::kStates:
      return sm90::launch_forward_walk<sm90::Walk::kStates>(forward, workspace, stream);
    case BackwardStep::kStateGradients:
      return sm90::launch_backward_walk(params, workspace, stream);
    case BackwardStep::kGradients:
      return sm90::launch_gradients(params, workspace, sm90::multiprocessors(), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sluice
