// SPDX-License-Identifier: Apache-2.0
// Sums over many rows in an order that their number alone decides: blocks add their rows and leave one row each, a
// second kernel adds those.
#pragma once

#include <cstdint>

namespace sluice {

constexpr int kSumColumns = 32;
constexpr int kSumRows = 8;
inline dim3 column_sum_threads() { return dim3(kSumColumns, kSumRows); }
inline int column_sum_blocks(int columns) { return (columns + kSumColumns - 1) / kSumColumns; }

// Sum of column blockIdx.x * kSumColumns + threadIdx.x of partial [rows, columns], for the threads with threadIdx.y =
// 0; all threads of the block, column_sum_threads() of them, take part.
__device__ inline float column_sum(const float* partial, int rows, int columns) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 8
    for (int row = threadIdx.y; row < rows; row += kSumRows)
      sum += partial[static_cast<int64_t>(row) * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int row = 1; row < kSumRows && threadIdx.y == 0; ++row) sum += sums[row][threadIdx.x];
  return sum;
}

}  // namespace sluice
