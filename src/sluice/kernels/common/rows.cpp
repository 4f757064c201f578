// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/multiarch.h"

namespace sluice {
namespace {

// The dims before the last as one or two dims with a stride each, or false where that needs a copy.
bool describe_rows(const Tensor& x, Rows& rows) {
  const auto width = x.size(-1);
  if (width > 1 && x.stride(-1) != 1) return false;
  rows = {.count = width > 0 ? x.numel() / width : 0, .width = width, .inner = 1, .outer_stride = 0, .inner_stride = 0};
  if (rows.count == 0) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // size and stride, innermost first, neighbours merged
  for (auto dim = x.dim() - 2; dim >= 0; --dim) {
    if (x.size(dim) == 1) continue;
    if (!dims.empty() && x.stride(dim) == dims.back().first * dims.back().second) {
      dims.back().first *= x.size(dim);
    } else {
      dims.emplace_back(x.size(dim), x.stride(dim));
    }
  }
  if (dims.size() > 2) return false;
  if (!dims.empty()) rows.inner = dims[0].first, rows.inner_stride = dims[0].second;
  if (dims.size() == 2) rows.outer_stride = dims[1].second;
  return true;
}

template <typename Real>
SLUICE_MULTIARCH void add_rows(const Real* rows, std::int64_t count, std::int64_t width, std::int64_t first,
                               std::int64_t last, Real* __restrict sum) {
  for (std::int64_t row = 0; row < count; ++row) {
    for (auto i = first; i < last; ++i) sum[i] += rows[row * width + i];
  }
}

}  // namespace

void check_float_type(std::string_view op, std::string_view name, const Tensor& x) {
  const auto type = x.scalar_type();
  SLUICE_CHECK(type == kFloat || type == kBFloat16 || type == kDouble,
               "{}: {} must be float32, bfloat16 or float64; got {}", op, name, describe(x));
}

Rows rows_of(const Tensor& x) {
  Rows rows{};
  const bool possible = describe_rows(x, rows);
  SLUICE_CHECK(possible, "rows_of: {} has no dense rows; take with_rows first", describe(x));
  return rows;
}

Tensor with_rows(const Tensor& x) {
  Rows rows{};
  return describe_rows(x, rows) ? x : x.contiguous();
}

RowBlocks row_blocks(std::int64_t rows, std::int64_t smallest) {
  constexpr std::int64_t kMost = 256;
  const auto size = std::max(smallest, (rows + kMost - 1) / kMost);
  return {.rows = rows, .size = size, .count = (rows + size - 1) / size};
}

Tensor sum_in_order(const Tensor& partial) {
  const auto count = partial.size(0), width = partial.size(1);
  auto sum = at::zeros({width}, partial.options());
  AT_DISPATCH_FLOATING_TYPES(partial.scalar_type(), "sum_in_order", [&] {
    const auto* from = partial.const_data_ptr<scalar_t>();
    auto* to = sum.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, width, rows_per_task(count),
                     [&](std::int64_t first, std::int64_t last) { add_rows(from, count, width, first, last, to); });
  });
  return sum;
}

}  // namespace sluice
