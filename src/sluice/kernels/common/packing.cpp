// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/packing.h"

#include "sluice/core/error.h"

namespace sluice {

void check_cu_seqlens(std::string_view op, const Tensor& cu_seqlens) {
  SLUICE_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.scalar_type() == kInt && cu_seqlens.size(0) >= 1,
               "{}: cu_seqlens must be int32 [sequences + 1]; got {}", op, describe(cu_seqlens));
}

std::vector<std::int64_t> sequence_bounds(const Tensor& cu_seqlens) {
  const auto dense = cu_seqlens.contiguous();
  const auto* first = dense.const_data_ptr<std::int32_t>();
  return {first, first + dense.numel()};
}

std::vector<std::int64_t> checked_bounds(std::string_view op, const Tensor& cu_seqlens, std::int64_t tokens) {
  auto bounds = sequence_bounds(cu_seqlens);
  SLUICE_CHECK(bounds.front() == 0 && bounds.back() == tokens,
               "{}: cu_seqlens must begin with 0 and end with the number of tokens, {}; it runs from {} to {}", op,
               tokens, bounds.front(), bounds.back());
  for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
    SLUICE_CHECK(bounds[n] <= bounds[n + 1], "{}: cu_seqlens falls from {} to {} at sequence {}", op, bounds[n],
                 bounds[n + 1], n);
  }
  return bounds;
}

}  // namespace sluice
