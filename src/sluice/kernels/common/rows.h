// SPDX-License-Identifier: Apache-2.0
// Tensors seen as rows, for CPU loops: addressing without copies, work per thread, sums over rows in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "sluice/core/tensor.h"

namespace sluice {

// float32, bfloat16 or float64: what the operators compute with.
void check_float_type(std::string_view op, std::string_view name, const Tensor& x);

// The accumulation type of a dtype, as Wide in lanes.h.
inline at::ScalarType wide_type(at::ScalarType type) { return type == kDouble ? kDouble : kFloat; }

// Where the rows of a tensor [..., width] begin, in elements from its first; within a row elements are neighbours.
// Columns of a wider matrix and heads inside them fit: row (i, j) of [outer, inner, width] has two strides.
struct Rows {
  std::int64_t count, width, inner, outer_stride, inner_stride;
  std::int64_t offset(std::int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};
Rows rows_of(const Tensor& x);

// x itself where Rows can describe it, else a dense copy.
Tensor with_rows(const Tensor& x);

// Rows (or other pieces of `width` elements) worth a thread of their own: fewer cost more in hand-over than they save.
inline std::int64_t rows_per_task(std::int64_t width) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
}

// How rows are cut for a sum over all of them: by their number alone, so that the sum's order, and its bits, do not
// depend on threads. At most 256 blocks bound the memory of the partial sums.
struct RowBlocks {
  std::int64_t rows, size, count;
  std::int64_t begin(std::int64_t block) const { return block * size; }
  std::int64_t end(std::int64_t block) const { return std::min(rows, (block + 1) * size); }
};
RowBlocks row_blocks(std::int64_t rows, std::int64_t smallest);

// [blocks, width] -> [width], added in the order of the blocks.
Tensor sum_in_order(const Tensor& partial);

}  // namespace sluice
