// SPDX-License-Identifier: Apache-2.0
// The rule token by token, for decoding. Bound by memory: a block reads a state once, keeps it in registers through the
// sequence's tokens and writes it back. A warp holds every kWarps-th row of it, a thread four neighbours in each of
// these; what the rows add up to goes through shared memory.
#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/gated_delta_rule/params.h"

namespace sluice {
namespace {

constexpr int kDim = 128;  // K and V
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kLanes = kDim / 32;     // columns of a thread
constexpr int kRows = kDim / kWarps;  // rows of a warp
using Row = Lanes<float, kLanes>;

// The sum of x^2 over a head's elements, of which each lane of a warp has four.
__device__ float sum_of_squares(const float (&x)[kLanes]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

// A head's key or query to shared memory, by one warp.
__device__ void put(float* shared, const __nv_bfloat16* source, bool l2norm, float scale) {
  const int first = threadIdx.x % 32 * kLanes;
  const auto read = Lanes<__nv_bfloat16, kLanes>::load(source + first);
  float x[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) x[i] = widen(read.value[i]);
  if (l2norm) scale *= rsqrtf(sum_of_squares(x) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) shared[first + i] = x[i] * scale;
}

// The sum over warps of their `part`, for this thread's columns. All threads of the block call it.
__device__ Row sum_over_warps(const Row& part, Row (&scratch)[kWarps][32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  scratch[warp][lane] = part;
  __syncthreads();
  Row sum = scratch[0][lane];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum.value[i] += scratch[other][lane].value[i];
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) few_tokens(const GatedDeltaCachedParams params) {
  const auto& rule = params.rule;
  const int head = blockIdx.x, sequence = blockIdx.y, warp = threadIdx.x / 32, column = threadIdx.x % 32 * kLanes;
  const int key_head = head / (rule.value_heads / rule.key_heads);
  const int first = rule.cu_seqlens[sequence], last = rule.cu_seqlens[sequence + 1];
  if (first == last) return;
  float* const state = params.states + (params.slots[sequence] * rule.value_heads + head) * kDim * kDim + column;
  __shared__ float k[kDim], q[kDim];
  __shared__ Row predictions[kWarps][32], outputs[kWarps][32];

  Row s[kRows];  // rows warp, warp + kWarps, ..
#pragma unroll
  for (int r = 0; r < kRows; ++r) s[r] = Row::load(state + (r * kWarps + warp) * kDim);
  for (int token = first; token < last; ++token) {
    if (warp == 0) put(k, rule.k + token * rule.k_stride + key_head * kDim, rule.qk_l2norm, 1);
    if (warp == 1) put(q, rule.q + token * rule.q_stride + key_head * kDim, rule.qk_l2norm, rule.scale);
    const auto v = Lanes<__nv_bfloat16, kLanes>::load(rule.v + token * rule.v_stride + head * kDim + column);
    const auto gate = static_cast<int64_t>(token) * rule.value_heads + head;
    const float decay = expf(rule.g[gate]), beta = rule.beta[gate];
    __syncthreads();
    Row part{};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float key = k[r * kWarps + warp];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        s[r].value[i] *= decay;
        part.value[i] = fmaf(s[r].value[i], key, part.value[i]);
      }
    }
    const Row predicted = sum_over_warps(part, predictions);
    float write[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) write[i] = beta * (widen(v.value[i]) - predicted.value[i]);
    part = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float key = k[r * kWarps + warp], query = q[r * kWarps + warp];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        s[r].value[i] = fmaf(key, write[i], s[r].value[i]);
        part.value[i] = fmaf(s[r].value[i], query, part.value[i]);
      }
    }
    const Row out = sum_over_warps(part, outputs);
    if (warp == 0) {
      narrow<__nv_bfloat16>(out.value).store(rule.out + (static_cast<int64_t>(token) * rule.value_heads + head) * kDim +
                                             column);
    }
    __syncthreads();  // before the next token's k and q
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) s[r].store(state + (r * kWarps + warp) * kDim);
}

}  // namespace

cudaError_t launch_gated_delta_rule_cached(const GatedDeltaCachedParams& params, cudaStream_t stream) {
  if (params.rule.sequences == 0) return cudaSuccess;
  few_tokens<<<dim3(params.rule.value_heads, params.rule.sequences), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sluice
