// SPDX-License-Identifier: Apache-2.0
// What stands around the grouped products, bound by memory: sums of a token's lines, and zeros for experts that got
// none.
#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/expert_matmul/params.h"

namespace sluice {
namespace {

using Element = __nv_bfloat16;
constexpr int kLanes = kVector<Element>, kThreads = 128;

__global__ __launch_bounds__(kThreads) void sum_lines(const __grid_constant__ SumLinesParams params) {
  const int64_t row = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kLanes;
  if (column >= params.width) return;
  const auto* lines = static_cast<const Element*>(params.lines) + column;
  float sum[kLanes] = {};
  for (int32_t i = params.begin[row]; i < params.begin[row + 1]; ++i) {
    const auto line = Lanes<Element, kLanes>::load(lines + params.order[i] * params.width);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += widen(line.value[lane]);
  }
  narrow<Element>(sum).store(static_cast<Element*>(params.out) + row * params.width + column);
}

__global__ __launch_bounds__(kThreads) void clear_unused(const __grid_constant__ ClearUnusedParams params) {
  const int64_t expert = blockIdx.y;
  if (params.offsets[expert] != params.offsets[expert + 1]) return;
  auto* matrix = static_cast<Element*>(params.matrices) + expert * params.size;
  const int64_t step = int64_t{gridDim.x} * kThreads * kLanes;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kLanes; i < params.size; i += step) {
    Lanes<Element, kLanes>{}.store(matrix + i);
  }
}

}  // namespace

cudaError_t launch_sum_lines(const SumLinesParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.width == 0) return cudaSuccess;
  const int columns = kThreads * kLanes;
  const dim3 grid(static_cast<unsigned>(params.rows), static_cast<unsigned>((params.width + columns - 1) / columns));
  sum_lines<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_clear_unused(const ClearUnusedParams& params, cudaStream_t stream) {
  if (params.experts == 0 || params.size == 0) return cudaSuccess;
  constexpr unsigned kBlocks = 8;  // of an expert: most have lines and end at once
  clear_unused<<<dim3(kBlocks, static_cast<unsigned>(params.experts)), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sluice
