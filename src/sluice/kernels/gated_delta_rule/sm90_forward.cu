// SPDX-License-Identifier: Apache-2.0
// The walk forward (sm90_walk.cuh). With Walk::kOutput it writes the output and the final state; with Walk::kStates,
// for the backward pass, the state at the start of each chunk and the errors E; with Walk::kEnds, states alone. A chunk
// and V half takes 8 + 4 + 4 products of [64 x 64 or 128 x 16] on the chain (K S; N X; the state's update), and for the
// output 8 + 4 beside it (Q S; P E).
#include <algorithm>

#include "sluice/kernels/common/shared_memory.cuh"
#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {
namespace {

// Where the state of an item comes from, null for zeros, and where it goes at its end, null for nowhere.
template <Walk kWalk>
__device__ const float* start_of(const GatedDeltaParams& params, const Workspace& workspace, const WalkItem& item) {
  const int64_t head = item.head * kHeadDim * kHeadDim;
  if (item.starts) {
    return params.initial_state ? params.initial_state + item.sequence * workspace.state_size(params) + head : nullptr;
  }
  if (kWalk == Walk::kEnds && item.piece != workspace.first_piece()) return nullptr;
  return workspace.checkpoint(params, item.piece) + head;
}
template <Walk kWalk>
__device__ float* end_of(const GatedDeltaParams& params, const Workspace& workspace, const WalkItem& item) {
  const int64_t head = item.head * kHeadDim * kHeadDim;
  if (item.transition) return workspace.transition(params, item.piece) + head;
  if (item.ends) {
    return params.final_state ? params.final_state + item.sequence * workspace.state_size(params) + head : nullptr;
  }
  // Those between a segment's pieces are there when the output is walked to.
  if (kWalk == Walk::kOutput && item.piece != workspace.last_piece()) return nullptr;
  return workspace.checkpoint(params, item.piece + 1) + head;
}

template <Walk kWalk, int kGroups>
__device__ void consume_chunks(const GatedDeltaParams& params, const Workspace& workspace, uint8_t* memory, int group,
                               int thread) {
  using Layout = WalkLayout<kWalk, kGroups>;
  using Stage = typename Layout::Stage;
  constexpr bool kOutput = kWalk == Walk::kOutput, kStates = kWalk == Walk::kStates;
  const uint32_t shared = shared_address(memory);
  const uint32_t staging = shared + Layout::staging(group);
  const int lane = thread % 32;

  RingPosition<Layout::kStages> ring;
  RingPosition<1> turn;  // of the staging area
  WalkItem item;
  for (int index = blockIdx.x; find_walk_item<kWalk, kGroups>(item, params, workspace, index); index += gridDim.x) {
    const int column = (item.group + group) * kHalf;
    float state[64];  // S^T [64 v, 128 k]
    if (kWalk == Walk::kEnds && item.transition) {
      set_identity(state, column, thread);
    } else {
      load_state(state, start_of<kWalk>(params, workspace, item), column, thread);
    }

    for (int i = 0; i < item.chunks; ++i, ring.advance(), turn.advance()) {
      // From one lane, so that descriptors are made in uniform registers.
      const uint32_t stage = __shfl_sync(~0u, shared + ring.stage * Stage::bytes, 0);
      const float* factors = reinterpret_cast<const float*>(memory + ring.stage * Stage::bytes + Stage::factors);
      uint32_t state_operand[8][4];
      pack(state_operand, state);
      barrier_wait(Layout::full(shared, ring.stage), ring.parity);
      if (item.is_partial(i)) fence_async_proxy();
      float predicted[32];  // (K S)^T [64 v, 64 t]
      float out[32];        // O^T [64 v, 64 t]
      mma_fence();
      multiply_state(predicted, state_operand, stage + Stage::k);
      mma_commit();
      if constexpr (kOutput) {
        multiply_state(out, state_operand, stage + Stage::query);
        mma_commit();
      }
      uint32_t value[4][4];  // V^T [64 v, 64 t], then X^T
      load_transposed(value, stage + Stage::value + group * kTile, thread);
      if constexpr (kWalk == Walk::kEnds) {
        for (auto& pairs : value) {
          for (uint32_t& pair : pairs) pair = item.transition ? 0 : pair;
        }
      }
      const ColumnFactors predict_factors(factors + kPredict * kChunk, lane);
      if constexpr (kStates) {
        barrier_wait(Layout::stored(shared, group, Staged::kState), turn.parity ^ 1);
        store_rows(staging + kTile, state_operand, thread, kTile);
        barrier_arrive(Layout::staged(shared, group, Staged::kState));
      }
      mma_wait<kOutput ? 1 : 0>();
      pin(predicted);
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        // Fused by name: the walks for the output and for the states are to round alike.
        const float2 v = unpack(value[p / 4][p % 4]), f = predict_factors.value[p / 2];
        value[p / 4][p % 4] = pack(fmaf(-f.x, predicted[2 * p], v.x), fmaf(-f.y, predicted[2 * p + 1], v.y));
      }
      float error[32];  // E^T [64 v, 64 t]
      mma_fence();
      multiply_tile<Major::kSummedColumns>(error, value, stage + Stage::inverse, false);
      mma_commit();
      const ColumnFactors write_factors(factors + kWrite * kChunk, lane), read_factors(factors + kRead * kChunk, lane);
      const float decay = __expf(factors[kGate * kChunk + kChunk - 1]);
      mma_wait<0>();
      pin(error);

      uint32_t error_operand[4][4], write_operand[4][4];
      pack(error_operand, error);
      write_factors.scale(error);
      pack(write_operand, error);
#pragma unroll
      for (float& x : state) x *= decay;
      if constexpr (kOutput) {
        pin(out);
        read_factors.scale(out);
      }
      mma_fence();
      add_outer_products(state, write_operand, stage + Stage::k);
      if constexpr (kOutput) multiply_tile<Major::kSummedColumns>(out, error_operand, stage + Stage::scores, true);
      mma_commit();
      if constexpr (kOutput || kStates) barrier_wait(Layout::stored(shared, group, Staged::kTokens), turn.parity ^ 1);
      if constexpr (kStates) {
        store_transposed(staging, error_operand, thread);
        barrier_arrive(Layout::staged(shared, group, Staged::kTokens));
      }
      mma_wait<0>();
      pin(state);
      barrier_arrive(Layout::empty(shared, ring.stage));
      if constexpr (kOutput) {
        pin(out);
        uint32_t out_pairs[4][4];
        pack(out_pairs, out);
        store_transposed(staging, out_pairs, thread);
        barrier_arrive(Layout::staged(shared, group, Staged::kTokens));
      }
    }
    if constexpr (!kStates) {
      if (float* end = end_of<kWalk>(params, workspace, item)) store_state(end, state, column, thread);
    }
  }
}

template <Walk kWalk, int kGroups>
__global__ __launch_bounds__(WalkLayout<kWalk, kGroups>::kThreads,
                             1) void walk_forward(const __grid_constant__ GatedDeltaParams params,
                                                  const __grid_constant__ Workspace workspace,
                                                  const __grid_constant__ WalkRows rows) {
  using Layout = WalkLayout<kWalk, kGroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  Layout::init(shared);
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  if (warpgroup == kGroups) {
    if constexpr (kGroups == 2) registers_decrease<72>();
    const int storer = thread / 32 - 1, lane = thread % 32;  // the storing warp's group
    if (storer < 0) {
      load_chunks<kWalk, kGroups>(params, workspace, rows, shared, lane);
    } else if (kWalk != Walk::kEnds && storer < kGroups) {
      store_chunks<kWalk, kGroups>(params, workspace, rows.result,
                                   kWalk == Walk::kOutput ? 0 : segment_token(params, workspace), workspace.state,
                                   memory, storer, lane);
    }
  } else {
    if constexpr (kGroups == 2) registers_increase<216>();
    consume_chunks<kWalk, kGroups>(params, workspace, memory, warpgroup, thread);
  }
}

template <Walk kWalk, int kGroups>
cudaError_t launch(const GatedDeltaParams& params, const Workspace& workspace, int multiprocessors,
                   cudaStream_t stream) {
  using Layout = WalkLayout<kWalk, kGroups>;
  const int grid = std::min(most_walk_items<kWalk, kGroups>(params, workspace), multiprocessors);
  constexpr bool kOutput = kWalk == Walk::kOutput;
  WalkRows rows;
  if (const cudaError_t error =
          make_walk_rows(rows, params, params.v, params.v_stride, kOutput ? params.out : workspace.error,
                         kOutput ? params.tokens : workspace.segment_chunks * kChunk,
                         static_cast<int64_t>(params.value_heads) * kHeadDim);
      error != cudaSuccess) {
    return error;
  }
  return launch_with_shared_memory(walk_forward<kWalk, kGroups>, grid, Layout::kThreads, Layout::bytes, stream, params,
                                   workspace, rows);
}

}  // namespace

template <Walk kWalk>
cudaError_t launch_forward_walk(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  const int all = multiprocessors();
  return split_values<kWalk>(params, workspace, all) ? launch<kWalk, 1>(params, workspace, all, stream)
                                                     : launch<kWalk, 2>(params, workspace, all, stream);
}
template cudaError_t launch_forward_walk<Walk::kOutput>(const GatedDeltaParams&, const Workspace&, cudaStream_t);
template cudaError_t launch_forward_walk<Walk::kStates>(const GatedDeltaParams&, const Workspace&, cudaStream_t);
template cudaError_t launch_forward_walk<Walk::kEnds>(const GatedDeltaParams&, const Workspace&, cudaStream_t);

}  // namespace sluice::sm90
