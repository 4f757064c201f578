// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/pack.h"

#include <cassert>
#include <utility>

#include "sluice/parallel/collectives.h"

namespace sluice {

Pack make_pack(std::vector<std::int64_t> lengths, std::vector<std::int64_t> past, std::vector<std::int64_t> slots,
               at::Device device) {
  assert(past.empty() || past.size() == lengths.size());
  assert(slots.size() == past.size());
  std::vector<std::int32_t> bounds{0};
  std::vector<std::int64_t> positions;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    bounds.push_back(bounds.back() + static_cast<std::int32_t>(lengths[n]));
    const auto first = past.empty() ? 0 : past[n];
    for (std::int64_t i = 0; i < lengths[n]; ++i) positions.push_back(first + i);
  }
  return {.lengths = std::move(lengths),
          .past = std::move(past),
          .slots = std::move(slots),
          .cu_seqlens = at::tensor(bounds, at::TensorOptions().dtype(kInt)).to(device, /*non_blocking=*/true),
          .positions = at::tensor(positions, at::TensorOptions().dtype(kLong)).to(device, /*non_blocking=*/true)};
}

Tensor gather_tokens(const Tensor& x, const ForwardContext& context) {
  return all_gather_rows(x, context.split.rows, context.mesh.tp());
}

Tensor scatter_tokens(const Tensor& x, const ForwardContext& context) {
  return reduce_scatter_rows(x, context.split.rows, context.mesh.tp());
}

}  // namespace sluice
