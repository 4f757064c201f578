// SPDX-License-Identifier: Apache-2.0
// The walk forward (sm90_walk.cuh). With Walk::kOutput it writes the output and the final state; with Walk::kStates,
// for the backward pass, the state at the start of each chunk and the errors E. A chunk and V half takes 8 + 4 + 4
// products of [64 x 64 or 128 x 16] on the chain (K S; N X; the state's update), and for the output 8 + 4 beside it (Q
// S; P E).
#include <algorithm>

#include "sluice/kernels/common/shared_memory.cuh"
#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {
namespace {

// Tiles a group stages: [64 t, 64 v] of output or errors; and the state's two.
template <Walk kWalk>
constexpr int kStagingTiles = kWalk == Walk::kOutput ? 1 : 3;

template <Walk kWalk, int kGroups>
using Layout = WalkLayout<kGroups, kWalk == Walk::kOutput, kStagingTiles<kWalk>>;

// The state at the start of a segment that does not begin with its sequence.
__device__ float* checkpoint(const GatedDeltaParams& params, int head, int segment) {
  return params.checkpoints + (static_cast<int64_t>(segment - 1) * params.value_heads + head) * kHeadDim * kHeadDim;
}

template <Walk kWalk, int kGroups>
__device__ void consume_chunks(const GatedDeltaParams& params, const Workspace& workspace, uint8_t* memory, int group,
                               int thread) {
  using Layout = sm90::Layout<kWalk, kGroups>;
  using Stage = typename Layout::Stage;
  constexpr bool kOutput = kWalk == Walk::kOutput;
  const uint32_t shared = shared_address(memory);
  const uint32_t staging = shared + Layout::staging(group);
  const int lane = thread % 32;

  RingPosition<Layout::kStages> ring;
  RingPosition<1> turn;  // of the staging area
  for (int index = blockIdx.x; index < walk_items<kGroups>(params, workspace); index += gridDim.x) {
    const WalkItem item = walk_item<kGroups>(params, workspace, index);
    const int column = (item.group + group) * kHalf;
    const int64_t state_block =
        (static_cast<int64_t>(item.sequence) * params.value_heads + item.head) * kHeadDim * kHeadDim;

    float state[64];  // S^T [64 v, 128 k]
    const float* start = params.initial_state ? params.initial_state + state_block : nullptr;
    if (!item.starts) start = checkpoint(params, item.head, workspace.segment);
    load_state(state, start, column, thread);

    for (int i = 0; i < item.chunks; ++i, ring.advance()) {
      const uint32_t stage = shared + ring.stage * Stage::bytes;
      const float* factors = reinterpret_cast<const float*>(memory + ring.stage * Stage::bytes + Stage::factors);
      barrier_wait(Layout::full(shared, ring.stage), ring.parity);
      fence_async_proxy();

      uint32_t value[4][4];  // V^T [64 v, 64 t], then X^T
      load_transposed(value, stage + Stage::value + group * kTile, thread);
      uint32_t state_operand[8][4];
      pack(state_operand, state);
      float predicted[32];  // (K S)^T [64 v, 64 t]
      float out[32];        // O^T [64 v, 64 t]
      mma_fence();
      multiply_state(predicted, state_operand, stage + Stage::k);
      mma_commit();
      if constexpr (kOutput) {
        multiply_state(out, state_operand, stage + Stage::query);
        mma_commit();
      } else {
        barrier_wait(Layout::stored(shared, group, Staged::kState), turn.parity ^ 1);
        store_rows(staging + kTile, state_operand, thread, kTile);
        fence_async_proxy();
        barrier_arrive(Layout::staged(shared, group, Staged::kState));
      }
      const ColumnFactors predict_factors(factors + kPredict * kChunk, lane);
      mma_wait<kOutput ? 1 : 0>();
      pin(predicted);
      predict_factors.scale(predicted);
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        const float2 v = unpack(value[p / 4][p % 4]);
        value[p / 4][p % 4] = pack(v.x - predicted[2 * p], v.y - predicted[2 * p + 1]);
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
      barrier_wait(Layout::stored(shared, group, Staged::kTokens), turn.parity ^ 1);
      if constexpr (!kOutput) {
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
      turn.advance();
    }
    if constexpr (kOutput) {
      float* end = params.final_state ? params.final_state + state_block : nullptr;
      if (!item.ends) end = checkpoint(params, item.head, workspace.segment + 1);
      if (end) store_state(end, state, column, thread);
    }
  }
}

template <Walk kWalk, int kGroups>
__global__ __launch_bounds__(Layout<kWalk, kGroups>::kThreads,
                             1) void walk_forward(const __grid_constant__ GatedDeltaParams params,
                                                  const __grid_constant__ Workspace workspace) {
  using Layout = sm90::Layout<kWalk, kGroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  Layout::init(shared);
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  if (warpgroup == kGroups) {
    if constexpr (kGroups == 2) registers_decrease<56>();
    const int storer = thread / 32 - kLoaders / 32;  // its group
    if (thread < kLoaders) {
      load_chunks<Layout, kGroups, kWalk == Walk::kOutput, false>(params, workspace, params.v, params.v_stride, shared,
                                                                  thread);
    } else if (storer < kGroups) {
      constexpr bool kOutput = kWalk == Walk::kOutput;
      store_chunks<Layout, kGroups, false>(params, workspace, kOutput ? params.out : workspace.error,
                                           static_cast<int64_t>(params.value_heads) * kHeadDim,
                                           kOutput ? 0 : segment_token(params, workspace),
                                           kOutput ? nullptr : workspace.state, memory, storer, thread % 32);
    }
  } else {
    if constexpr (kGroups == 2) registers_increase<224>();
    consume_chunks<kWalk, kGroups>(params, workspace, memory, warpgroup, thread);
  }
}

template <Walk kWalk, int kGroups>
cudaError_t launch(const GatedDeltaParams& params, const Workspace& workspace, int multiprocessors,
                   cudaStream_t stream) {
  using Layout = sm90::Layout<kWalk, kGroups>;
  const int grid = std::min(walk_items<kGroups>(params, params.sequences), multiprocessors);
  return launch_with_shared_memory(walk_forward<kWalk, kGroups>, grid, Layout::kThreads, Layout::bytes, stream, params,
                                   workspace);
}

}  // namespace

template <Walk kWalk>
cudaError_t launch_forward_walk(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  const int all = multiprocessors();
  return split_values(params, all) ? launch<kWalk, 1>(params, workspace, all, stream)
                                   : launch<kWalk, 2>(params, workspace, all, stream);
}
template cudaError_t launch_forward_walk<Walk::kOutput>(const GatedDeltaParams&, const Workspace&, cudaStream_t);
template cudaError_t launch_forward_walk<Walk::kStates>(const GatedDeltaParams&, const Workspace&, cudaStream_t);

}  // namespace sluice::sm90
