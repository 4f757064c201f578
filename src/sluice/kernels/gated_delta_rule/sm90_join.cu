// SPDX-License-Identifier: Apache-2.0
// The states between the pieces of a segment (sm90.cuh), one piece after the other: a piece that a sequence crosses has
// left what its walk gives from zero at its end, to which its transition adds what it makes of the state at its start;
// backward likewise, from end to start by the transition's transpose. In fp32. A CTA owns some V columns of a value
// head, a thread one of their K rows.
#include "sluice/kernels/gated_delta_rule/sm90.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kColumns = 16;  // of V

template <bool kBackward>
__global__ __launch_bounds__(kHeadDim) void join(const __grid_constant__ GatedDeltaParams params,
                                                 const __grid_constant__ Workspace workspace) {
  __shared__ __align__(16) float known[kHeadDim][kColumns];
  const int row = threadIdx.x;
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kHeadDim * kHeadDim, column = blockIdx.y * kColumns;
  for (int i = 1; i + 1 < workspace.segment_pieces; ++i) {
    const int piece = kBackward ? workspace.last_piece() - i : workspace.first_piece() + i;
    if (!workspace.is_crossed(piece)) continue;
    const float* from = kBackward ? workspace.carried(params, piece + 1) : workspace.checkpoint(params, piece);
    float* to = kBackward ? workspace.carried(params, piece) : workspace.checkpoint(params, piece + 1);
    const float* transition = workspace.transition(params, piece) + head;  // [k, k'], from k' to k
    from += head + row * kHeadDim + column;
    to += head + row * kHeadDim + column;
    float factor[kHeadDim];  // all on their way at once
#pragma unroll
    for (int k = 0; k < kHeadDim; k += kBackward ? 1 : 4) {
      if constexpr (kBackward) {
        factor[k] = transition[k * kHeadDim + row];
      } else {
        *reinterpret_cast<float4*>(&factor[k]) = *reinterpret_cast<const float4*>(transition + row * kHeadDim + k);
      }
    }
    float sum[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      *reinterpret_cast<float4*>(&known[row][j]) = *reinterpret_cast<const float4*>(from + j);
      *reinterpret_cast<float4*>(&sum[j]) = *reinterpret_cast<const float4*>(to + j);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kHeadDim; ++k) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[j] += factor[k] * known[k][j];
    }
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      *reinterpret_cast<float4*>(to + j) = *reinterpret_cast<const float4*>(&sum[j]);
    }
    __syncthreads();
  }
}

template <bool kBackward>
cudaError_t launch(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  join<kBackward><<<dim3(params.value_heads, kHeadDim / kColumns), kHeadDim, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_join_forward(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  return launch<false>(params, workspace, stream);
}
cudaError_t launch_join_backward(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  return launch<true>(params, workspace, stream);
}

}  // namespace sluice::sm90
