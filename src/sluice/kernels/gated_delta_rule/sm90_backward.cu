// SPDX-License-Identifier: Apache-2.0
// The walk backward (sm90_walk.cuh): carries the state's gradient from the last chunk to the first, as dS^T in
// registers, [64 v, 128 k], and writes, for each chunk, the gradient of the state at its end and the gradient of v
// (Walk::kStateGradients), or neither (Walk::kStarts). Per chunk, with dO the gradient of the output and the names of
// sm90.cuh (N, P and the factors are those of the forward walk):
//   dE = P^T dO + beta e^(G_C - G) (K~ dS')      dV = N^T dE
//   dS = e^G_C dS' - K~^T (e^G dV) + scale Q~^T (e^G dO)
#include <algorithm>

#include "sluice/kernels/common/shared_memory.cuh"
#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {
namespace {

constexpr uint32_t kSigns = 0x80008000;  // of a pair of bf16

// Where the gradient of an item's state comes from, null for zeros, and where it goes at its start, null for nowhere.
template <Walk kWalk>
__device__ const float* end_of(const GatedDeltaBackwardParams& backward, const Workspace& workspace,
                               const WalkItem& item) {
  const GatedDeltaParams& params = backward.forward;
  const int64_t head = item.head * kHeadDim * kHeadDim;
  if (item.ends) {
    return backward.grad_final_state ? backward.grad_final_state + item.sequence * workspace.state_size(params) + head
                                     : nullptr;
  }
  if (kWalk == Walk::kStarts && item.piece != workspace.last_piece()) return nullptr;
  return workspace.carried(params, item.piece + 1) + head;
}
template <Walk kWalk>
__device__ float* start_of(const GatedDeltaBackwardParams& backward, const Workspace& workspace, const WalkItem& item) {
  const GatedDeltaParams& params = backward.forward;
  const int64_t head = item.head * kHeadDim * kHeadDim;
  if (item.starts) {
    return backward.grad_initial_state
               ? backward.grad_initial_state + item.sequence * workspace.state_size(params) + head
               : nullptr;
  }
  // Those between a segment's pieces are there when all gradients are walked to.
  if (kWalk == Walk::kStateGradients && item.piece != workspace.first_piece()) return nullptr;
  return workspace.carried(params, item.piece) + head;
}

template <Walk kWalk, int kGroups>
__device__ void consume_chunks(const GatedDeltaBackwardParams& backward, const Workspace& workspace, uint8_t* memory,
                               int group, int thread) {
  using Layout = WalkLayout<kWalk, kGroups>;
  using Stage = typename Layout::Stage;
  constexpr bool kAll = kWalk == Walk::kStateGradients;
  const GatedDeltaParams& params = backward.forward;
  const uint32_t shared = shared_address(memory);
  const uint32_t staging = shared + Layout::staging(group);
  const int lane = thread % 32;

  RingPosition<Layout::kStages> ring;
  RingPosition<1> turn;  // of the staging area
  WalkItem item;
  for (int index = blockIdx.x; find_walk_item<kWalk, kGroups>(item, params, workspace, index); index += gridDim.x) {
    const int column = (item.group + group) * kHalf;
    float state[64];  // dS^T [64 v, 128 k]
    load_state(state, end_of<kWalk>(backward, workspace, item), column, thread);

    for (int i = item.chunks - 1; i >= 0; --i, ring.advance(), turn.advance()) {
      // From one lane, so that descriptors are made in uniform registers.
      const uint32_t stage = __shfl_sync(~0u, shared + ring.stage * Stage::bytes, 0);
      const float* factors = reinterpret_cast<const float*>(memory + ring.stage * Stage::bytes + Stage::factors);
      uint32_t state_operand[8][4];
      pack(state_operand, state);
      barrier_wait(Layout::full(shared, ring.stage), ring.parity);
      if (item.is_partial(i)) fence_async_proxy();
      float written[32];     // (K dS')^T [64 v, 64 t]
      float error_grad[32];  // (P^T dO)^T, then dE^T [64 v, 64 t]
      mma_fence();
      multiply_state(written, state_operand, stage + Stage::k);
      uint32_t out_grad[4][4];  // dO^T [64 v, 64 t]
      load_transposed(out_grad, stage + Stage::value + group * kTile, thread);
      mma_fence();
      multiply_tile<Major::kSummedRows>(error_grad, out_grad, stage + Stage::scores, false);
      mma_commit();
      if constexpr (kAll) {
        barrier_wait(Layout::stored(shared, group, Staged::kState), turn.parity ^ 1);
        store_rows(staging + kTile, state_operand, thread, kTile);
        barrier_arrive(Layout::staged(shared, group, Staged::kState));
      }
      uint32_t read_grad[4][4];  // scale e^G rq dO^T
      const ColumnFactors read_factors(factors + kRead * kChunk, lane), write_factors(factors + kWrite * kChunk, lane);
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        const float2 x = unpack(out_grad[p / 4][p % 4]), f = read_factors.value[p / 2];
        read_grad[p / 4][p % 4] = pack(x.x * f.x, x.y * f.y);
      }
      const float decay = __expf(factors[kGate * kChunk + kChunk - 1]);
      mma_wait<0>();
      pin(written);
      pin(error_grad);
#pragma unroll
      for (int p = 0; p < 32; ++p) {
        const float2 f = write_factors.value[p / 4];
        error_grad[p] = fmaf(p % 2 == 0 ? f.x : f.y, written[p], error_grad[p]);
      }
      uint32_t left[4][4];
      pack(left, error_grad);
#pragma unroll
      for (float& x : state) x *= decay;
      float value_grad[32];  // dV^T [64 v, 64 t]
      mma_fence();
      multiply_tile<Major::kSummedRows>(value_grad, left, stage + Stage::inverse, false);
      mma_commit();
      add_outer_products(state, read_grad, stage + Stage::query);
      mma_commit();
      const ColumnFactors predict_factors(factors + kPredict * kChunk, lane);
      mma_wait<1>();
      pin(value_grad);

      uint32_t value_grad_pairs[4][4];
      pack(value_grad_pairs, value_grad);
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        const float2 f = predict_factors.value[p / 2];
        left[p / 4][p % 4] = pack(f.x * value_grad[2 * p], f.y * value_grad[2 * p + 1]) ^ kSigns;
      }
      mma_fence();
      add_outer_products(state, left, stage + Stage::k);
      mma_commit();
      if constexpr (kAll) {
        barrier_wait(Layout::stored(shared, group, Staged::kTokens), turn.parity ^ 1);
        store_transposed(staging, value_grad_pairs, thread);
        barrier_arrive(Layout::staged(shared, group, Staged::kTokens));
      }
      mma_wait<0>();
      pin(state);
      barrier_arrive(Layout::empty(shared, ring.stage));
    }
    if (float* start = start_of<kWalk>(backward, workspace, item)) store_state(start, state, column, thread);
  }
}

template <Walk kWalk, int kGroups>
__global__ __launch_bounds__(WalkLayout<kWalk, kGroups>::kThreads,
                             1) void walk_backward(const __grid_constant__ GatedDeltaBackwardParams params,
                                                   const __grid_constant__ Workspace workspace,
                                                   const __grid_constant__ WalkRows rows) {
  using Layout = WalkLayout<kWalk, kGroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  Layout::init(shared);
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  if (warpgroup == kGroups) {
    if constexpr (kGroups == 2) registers_decrease<56>();
    const int storer = thread / 32 - 1, lane = thread % 32;  // the storing warp's group
    if (storer < 0) {
      load_chunks<kWalk, kGroups>(params.forward, workspace, rows, shared, lane);
    } else if (kWalk != Walk::kStarts && storer < kGroups) {
      store_chunks<kWalk, kGroups>(params.forward, workspace, rows.result, 0, workspace.state_grad, memory, storer,
                                   lane);
    }
  } else {
    if constexpr (kGroups == 2) registers_increase<224>();
    consume_chunks<kWalk, kGroups>(params, workspace, memory, warpgroup, thread);
  }
}

template <Walk kWalk, int kGroups>
cudaError_t launch(const GatedDeltaBackwardParams& params, const Workspace& workspace, int multiprocessors,
                   cudaStream_t stream) {
  using Layout = WalkLayout<kWalk, kGroups>;
  const int grid = std::min(most_walk_items<kWalk, kGroups>(params.forward, workspace), multiprocessors);
  WalkRows rows;
  if (const cudaError_t error = make_walk_rows(rows, params.forward, params.grad_out, params.grad_out_stride,
                                               params.grad_v, params.forward.tokens, params.grad_v_stride);
      error != cudaSuccess) {
    return error;
  }
  return launch_with_shared_memory(walk_backward<kWalk, kGroups>, grid, Layout::kThreads, Layout::bytes, stream, params,
                                   workspace, rows);
}

}  // namespace

template <Walk kWalk>
cudaError_t launch_backward_walk(const GatedDeltaBackwardParams& params, const Workspace& workspace,
                                 cudaStream_t stream) {
  const int all = multiprocessors();
  return split_values<kWalk>(params.forward, workspace, all) ? launch<kWalk, 1>(params, workspace, all, stream)
                                                             : launch<kWalk, 2>(params, workspace, all, stream);
}
template cudaError_t launch_backward_walk<Walk::kStateGradients>(const GatedDeltaBackwardParams&, const Workspace&,
                                                                 cudaStream_t);
template cudaError_t launch_backward_walk<Walk::kStarts>(const GatedDeltaBackwardParams&, const Workspace&,
                                                         cudaStream_t);

}  // namespace sluice::sm90
