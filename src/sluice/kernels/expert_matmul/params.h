// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. M lines, W features.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

// out[r] = the sum of lines[order[i]] over begin[r] <= i < begin[r + 1], in float32, rounded once.
struct SumLinesParams {
  const void* lines;     // [M, W] bfloat16, dense, W a multiple of 8
  const int64_t* order;  // [M]
  const int32_t* begin;  // [rows + 1]
  int64_t rows;
  int32_t width;
  void* out;  // [rows, W] bfloat16, dense
};
cudaError_t launch_sum_lines(const SumLinesParams& params, cudaStream_t stream);

// Zeros to the matrices of experts without a line.
struct ClearUnusedParams {
  const int32_t* offsets;  // [experts + 1]
  int64_t experts, size;   // elements of a matrix, a multiple of 8
  void* matrices;          // [experts, size] bfloat16, dense
};
cudaError_t launch_clear_unused(const ClearUnusedParams& params, cudaStream_t stream);

}  // namespace sluice
