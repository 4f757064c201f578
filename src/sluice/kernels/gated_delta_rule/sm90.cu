// SPDX-License-Identifier: Apache-2.0
// The launchers of params.h: what runs in which order, and where intermediate results lie.
#include <algorithm>

#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice {
namespace sm90 {

// One launch after the other, up to the first that fails.
struct Launches {
  cudaError_t error = cudaSuccess;
  void operator()(auto&& launch) {
    if (error == cudaSuccess) error = launch();
  }
};

// Pieces of a segment, walked side by side: 3 or more, or 1. The passes then take five walks along a piece (kEnds,
// kOutput, kStates, kStarts, kStateGradients) instead of three along the longest sequence, and twice hand states from
// piece to piece (us, H200). The multiprocessors must hold all walks at once, of which every place between pieces adds
// one. Nothing is known of the sequences' lengths here: equal ones need pieces least. Fitted to passes over one
// sequence of 6, 12 and 16 heads: to hand a state on takes 6 or 7 us of `join`, and its piece 2 to begin.
int segment_pieces(const GatedDeltaParams& params) {
  constexpr float kWalkChunk = 1.2f, kHandOn = 9, kLaunches = 9;
  const auto chunks = static_cast<float>(chunk_bound(params));
  const int most = multiprocessors() / (2 * std::max(params.value_heads, 1)) - params.sequences + 1;
  float least = 3 * kWalkChunk * chunks / static_cast<float>(std::max(params.sequences, 1));
  int best = 1;
  for (int pieces = 3; pieces <= most; ++pieces) {
    const auto count = static_cast<float>(pieces);
    const float time = 5 * kWalkChunk * chunks / count + 2 * (kHandOn * (count - 2) + kLaunches);
    if (time < least) least = time, best = pieces;
  }
  return best;
}

// Multiprocessors without a walk, where all walks are on the chip at once; below 0 where they are more.
int idle_in_walks(const GatedDeltaParams& params) {
  return multiprocessors() - 2 * params.sequences * params.value_heads;
}

// Pieces of equal length, up to 132 chunks: with that many a segment is a whole number of rounds of `gradients`, whose
// items are a chunk and key head, over 132 multiprocessors. A pack whose walks are more than fit at once needs longer
// ones, for enough of them.
Cut cut_of(const GatedDeltaParams& params) {
  const int most = idle_in_walks(params) >= 0 ? 132 : 528;
  const int chunks = std::max(chunk_bound(params), 1), pieces = segment_pieces(params);
  if (pieces == 1) return {std::min(most, chunks), 1};
  const int segments = (chunks + most * pieces - 1) / (most * pieces);
  return {(chunks + segments * pieces - 1) / (segments * pieces), pieces};
}

// The part of a segment's `gradients` that the multiprocessors which its walks leave idle can work out in their time,
// with `prepare` of another segment: a chunk's walks take 2.3 us whatever the heads, its gradients 5.2 us of one
// multiprocessor a value head, `prepare` 1.6 (H200). Below a quarter it is not worth its memory: 0. Of one sequence,
// all of 23 to 26 value heads, and a part of up to 40; with fewer heads pieces are walked, where they pay.
float part_beside(const GatedDeltaParams& params, Cut cut) {
  const int idle = idle_in_walks(params);
  if (cut.segment_pieces > 1 || idle <= 0) return 0;
  const float part = (2.3f * static_cast<float>(idle) / static_cast<float>(params.value_heads) - 1.6f) / 5.2f;
  return part < 0.25f ? 0 : std::min(part, 1.f);
}

Pass backward_pass(const GatedDeltaParams& params, Cut cut) {
  return part_beside(params, cut) > 0 ? Pass::kBackwardBeside : Pass::kBackward;
}

// All chunks in one piece.
Cut whole(const GatedDeltaParams& params) { return {std::max(chunk_bound(params), 1), 1}; }

Workspace make_workspace(const GatedDeltaParams& params, Cut cut, Pass pass) {
  Workspace workspace{};
  const int all_chunks = std::max(chunk_bound(params), 1);
  workspace.piece_chunks = cut.piece_chunks;
  workspace.segment_pieces = cut.segment_pieces;
  workspace.segment_chunks = cut.piece_chunks * cut.segment_pieces;
  workspace.segments = (all_chunks + workspace.segment_chunks - 1) / workspace.segment_chunks;
  workspace.pieces = workspace.segments * workspace.segment_pieces;
  size_t used = 0;
  const auto take = [&]<class T>(T*& pointer, size_t count) {
    pointer = reinterpret_cast<T*>(static_cast<char*>(params.workspace) + used);
    used += (count * sizeof(T) + 1023) / 1024 * 1024;
  };
  const size_t chunks = workspace.segment_chunks, blocks = chunks * params.value_heads;
  take(workspace.first_chunk, params.sequences + 1);
  take(workspace.chunk_rows, all_chunks);
  take(workspace.piece_sequences, workspace.pieces);
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
    take(workspace.carry, size_t{1} * (workspace.segment_pieces + 1) * params.value_heads * kHeadDim * kHeadDim);
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

// Those between pieces, and as many transitions where pieces are walked side by side.
int32_t gated_delta_rule_checkpoints(const GatedDeltaParams& params) {
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::cut_of(params), sm90::Pass::kForward);
  return (workspace.pieces - 1) * (workspace.segment_pieces > 1 ? 2 : 1);
}
size_t gated_delta_rule_workspace_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::cut_of(params), sm90::Pass::kForward).bytes;
}
size_t gated_delta_rule_backward_workspace_bytes(const GatedDeltaParams& params) {
  const sm90::Cut cut = sm90::cut_of(params);
  return sm90::make_workspace(params, cut, sm90::backward_pass(params, cut)).bytes;
}
size_t gated_delta_rule_prepared_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::whole(params), sm90::Pass::kForward).bytes;
}
size_t gated_delta_rule_backward_steps_bytes(const GatedDeltaParams& params) {
  return sm90::make_workspace(params, sm90::whole(params), sm90::Pass::kBackward).bytes;
}

cudaError_t launch_gated_delta_rule_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::cut_of(params), sm90::Pass::kForward);
  sm90::Launches then;
  then([&] { return sm90::launch_index(params, workspace, stream); });
  then([&] { return sm90::launch_prepare(params, workspace, 0, params.key_heads, false, stream); });
  for (int segment = 0; segment < workspace.segments; ++segment) {
    const sm90::Workspace here = sm90::with_segment(workspace, segment);
    if (workspace.segment_pieces > 1) {
      then([&] { return sm90::launch_forward_walk<sm90::Walk::kEnds>(params, here, stream); });
      then([&] { return sm90::launch_join_forward(params, here, stream); });
    }
    then([&] { return sm90::launch_forward_walk<sm90::Walk::kOutput>(params, here, stream); });
    if (segment + 1 < workspace.segments) {
      const sm90::Workspace next = sm90::with_segment(workspace, segment + 1);
      then([&] { return sm90::launch_prepare(params, next, 0, params.key_heads, true, stream); });
    }
  }
  return then.error;
}

namespace sm90 {
namespace {

// One kernel after the other, but for `prepare`.
cudaError_t launch_backward(const GatedDeltaBackwardParams& params, const Workspace& workspace, cudaStream_t stream) {
  const GatedDeltaParams& forward = params.forward;
  const int last = workspace.segments - 1, key_heads = forward.key_heads;
  Launches then;
  then([&] { return launch_index(forward, workspace, stream); });
  then([&] { return launch_prepare(forward, with_segment(workspace, last), 0, key_heads, false, stream); });
  for (int segment = last; segment >= 0; --segment) {
    const Workspace here = with_segment(workspace, segment);
    // The next segment is prepared beside the walks, half of the key heads beside each.
    const auto prepare_next = [&](int first, int end) {
      if (segment == 0 || first == end) return;
      then([&] { return launch_prepare(forward, with_segment(workspace, segment - 1), first, end, true, stream); });
    };
    then([&] { return launch_forward_walk<Walk::kStates>(forward, here, stream); });
    prepare_next(0, key_heads / 2);
    if (workspace.segment_pieces > 1) {
      then([&] { return launch_backward_walk<Walk::kStarts>(params, here, stream); });
      then([&] { return launch_join_backward(forward, here, stream); });
    }
    then([&] { return launch_backward_walk<Walk::kStateGradients>(params, here, stream); });
    prepare_next(key_heads / 2, key_heads);
    then([&] { return launch_gradients(params, here, 0, 1, multiprocessors(), stream); });
  }
  return then.error;
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

// `gradients` of a segment, or `part` of it, beside the walks along the next, which go through `walks`. A segment's
// places are used again by the third after it (prepared) and the second (walked), when its gradients are done.
cudaError_t launch_backward_beside(const GatedDeltaBackwardParams& params, const Workspace& workspace, float part,
                                   cudaStream_t stream, cudaStream_t walks) {
  const GatedDeltaParams& forward = params.forward;
  const int last = workspace.segments - 1, key_heads = forward.key_heads, all = multiprocessors();
  Event walked, done[2];
  Launches then;
  then([&] { return walked.order(stream, walks); });
  then([&] { return launch_index(forward, workspace, walks); });
  then([&] { return launch_prepare(forward, with_segment(workspace, last), 0, key_heads, false, walks); });
  for (int segment = last; segment >= 0; --segment) {
    const Workspace here = with_segment(workspace, segment);
    if (segment + 2 <= last) then([&] { return done[segment % 2].wait(walks); });
    then([&] { return launch_forward_walk<Walk::kStates>(forward, here, walks); });
    then([&] { return launch_backward_walk<Walk::kStateGradients>(params, here, walks); });
    if (segment > 0) {
      then([&] { return launch_prepare(forward, with_segment(workspace, segment - 1), 0, key_heads, true, walks); });
    }
    then([&] { return walked.order(walks, stream); });
    const float beside = segment > 0 ? part : 0;
    then([&] { return launch_gradients(params, here, 0, beside, idle_in_walks(forward), stream); });
    then([&] { return launch_gradients(params, here, beside, 1, all, stream); });
    then([&] { return done[segment % 2].record(stream); });
  }
  return then.error;
}

}  // namespace
}  // namespace sm90

cudaError_t launch_gated_delta_rule_backward_sm90(const GatedDeltaBackwardParams& params, cudaStream_t stream,
                                                  cudaStream_t beside) {
  if (params.forward.sequences == 0) return cudaSuccess;
  const sm90::Cut cut = sm90::cut_of(params.forward);
  const sm90::Pass pass = sm90::backward_pass(params.forward, cut);
  const sm90::Workspace workspace = sm90::make_workspace(params.forward, cut, pass);
  return pass == sm90::Pass::kBackwardBeside && workspace.segments > 1
             ? sm90::launch_backward_beside(params, workspace, sm90::part_beside(params.forward, cut), stream, beside)
             : sm90::launch_backward(params, workspace, stream);
}

// The backward pass's workspace begins as the forward pass's.
cudaError_t launch_gated_delta_rule_prepare_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::whole(params), sm90::Pass::kForward);
  sm90::Launches then;
  then([&] { return sm90::launch_index(params, workspace, stream); });
  then([&] { return sm90::launch_prepare(params, workspace, 0, params.key_heads, false, stream); });
  return then.error;
}

cudaError_t launch_gated_delta_rule_prepared_sm90(const GatedDeltaParams& params, cudaStream_t stream) {
  if (params.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(params, sm90::whole(params), sm90::Pass::kForward);
  return sm90::launch_forward_walk<sm90::Walk::kOutput>(params, workspace, stream);
}

cudaError_t launch_gated_delta_rule_backward_step_sm90(const GatedDeltaBackwardParams& params, BackwardStep step,
                                                       cudaStream_t stream) {
  const GatedDeltaParams& forward = params.forward;
  if (forward.sequences == 0) return cudaSuccess;
  const sm90::Workspace workspace = sm90::make_workspace(forward, sm90::whole(forward), sm90::Pass::kBackward);
  switch (step) {
    case BackwardStep::kStates:
      return sm90::launch_forward_walk<sm90::Walk::kStates>(forward, workspace, stream);
    case BackwardStep::kStateGradients:
      return sm90::launch_backward_walk<sm90::Walk::kStateGradients>(params, workspace, stream);
    case BackwardStep::kGradients:
      return sm90::launch_gradients(params, workspace, 0, 1, sm90::multiprocessors(), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sluice
