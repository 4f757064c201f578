// SPDX-License-Identifier: Apache-2.0
// The walk backward (sm90_walk.cuh): carries the state's gradient from the last chunk to the first, as dS^T [64 v, 128
// k] in registers, and writes, for each chunk, the gradient of the state at its end, and the gradient of v. Per chunk,
// with dO the gradient of the output and the names of sm90.cuh (N, P and the factors are those of the forward walk):
//   dE = P^T dO + beta e^(G_C - G) (K~ dS')      dV = N^T dE
//   dS = e^G_C dS' - K~^T (e^G dV) + scale Q~^T (e^G dO)
#include <algorithm>

#include "sluice/kernels/common/shared_memory.cuh"
#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kStagingTiles = 3;  // one [64 t, 64 v] of dV, two of dS

template <int kGroups>
using Layout = WalkLayout<kGroups, true, kStagingTiles>;

// The gradient of the state at the start of a segment, written by it and read by the one before. Two places in turn: in
// one segment one sequence may read and another write.
__device__ float* carried(const GatedDeltaParams& params, const Workspace& workspace, int head, int segment) {
  return workspace.carry + (static_cast<int64_t>(segment % 2) * params.value_heads + head) * kHeadDim * kHeadDim;
}

template <int kGroups>
__device__ void consume_chunks(const GatedDeltaBackwardParams& backward, const Workspace& workspace, uint8_t* memory,
                               int group, int thread) {
  using Layout = sm90::Layout<kGroups>;
  using Stage = typename Layout::Stage;
  const GatedDeltaParams& params = backward.forward;
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

    float state[64];  // dS^T [64 v, 128 k]
    const float* end = backward.grad_final_state ? backward.grad_final_state + state_block : nullptr;
    if (!item.ends) end = carried(params, workspace, item.head, workspace.segment + 1);
    load_state(state, end, column, thread);

    for (int i = item.chunks - 1; i >= 0; --i, ring.advance()) {
      const uint32_t stage = shared + ring.stage * Stage::bytes;
      const float* factors = reinterpret_cast<const float*>(memory + ring.stage * Stage::bytes + Stage::factors);
      barrier_wait(Layout::full(shared, ring.stage), ring.parity);
      fence_async_proxy();

      uint32_t out_grad[4][4];  // dO^T [64 v, 64 t]
      load_transposed(out_grad, stage + Stage::value + group * kTile, thread);
      uint32_t state_operand[8][4];
      pack(state_operand, state);
      float written[32];     // (K dS')^T [64 v, 64 t]
      float error_grad[32];  // (P^T dO)^T, then dE^T [64 v, 64 t]
      mma_fence();
      multiply_state(written, state_operand, stage + Stage::k);
      multiply_tile<Major::kSummedRows>(error_grad, out_grad, stage + Stage::scores, false);
      mma_commit();
      barrier_wait(Layout::stored(shared, group, Staged::kState), turn.parity ^ 1);
      store_rows(staging + kTile, state_operand, thread, kTile);
      fence_async_proxy();
      barrier_arrive(Layout::staged(shared, group, Staged::kState));
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
      write_factors.scale(written);
#pragma unroll
      for (int p = 0; p < 32; ++p) error_grad[p] += written[p];
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
      for (float& x : value_grad) x = -x;
      predict_factors.scale(value_grad);
      pack(left, value_grad);
      mma_fence();
      add_outer_products(state, left, stage + Stage::k);
      mma_commit();
      barrier_wait(Layout::stored(shared, group, Staged::kTokens), turn.parity ^ 1);
      store_transposed(staging, value_grad_pairs, thread);
      barrier_arrive(Layout::staged(shared, group, Staged::kTokens));
      mma_wait<0>();
      pin(state);
      barrier_arrive(Layout::empty(shared, ring.stage));
      turn.advance();
    }
    float* begin = backward.grad_initial_state ? backward.grad_initial_state + state_block : nullptr;
    if (!item.starts) begin = carried(params, workspace, item.head, workspace.segment);
    if (begin) store_state(begin, state, column, thread);
  }
}

template <int kGroups>
__global__ __launch_bounds__(Layout<kGroups>::kThreads,
                             1) void walk_backward(const __grid_constant__ GatedDeltaBackwardParams params,
                                                   const __grid_constant__ Workspace workspace) {
  using Layout = sm90::Layout<kGroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  Layout::init(shared);
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  if (warpgroup == kGroups) {
    if constexpr (kGroups == 2) registers_decrease<56>();
    const int storer = thread / 32 - kLoaders / 32;  // its group
    if (thread < kLoaders) {
      load_chunks<Layout, kGroups, true, true>(params.forward, workspace, params.grad_out, params.grad_out_stride,
                                               shared, thread);
    } else if (storer < kGroups) {
      store_chunks<Layout, kGroups, true>(params.forward, workspace, params.grad_v, params.grad_v_stride, 0,
                                          workspace.state_grad, memory, storer, thread % 32);
    }
  } else {
    if constexpr (kGroups == 2) registers_increase<224>();
    consume_chunks<kGroups>(params, workspace, memory, warpgroup, thread);
  }
}

template <int kGroups>
cudaError_t launch(const GatedDeltaBackwardParams& params, const Workspace& workspace, int multiprocessors,
                   cudaStream_t stream) {
  using Layout = sm90::Layout<kGroups>;
  const int grid = std::min(walk_items<kGroups>(params.forward, params.forward.sequences), multiprocessors);
  return launch_with_shared_memory(walk_backward<kGroups>, grid, Layout::kThreads, Layout::bytes, stream, params,
                                   workspace);
}

}  // namespace

cudaError_t launch_backward_walk(const GatedDeltaBackwardParams& params, const Workspace& workspace,
                                 cudaStream_t stream) {
  const int all = multiprocessors();
  return split_values(params.forward, all) ? launch<1>(params, workspace, all, stream)
                                           : launch<2>(params, workspace, all, stream);
}

}  // namespace sluice::sm90
