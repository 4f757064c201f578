// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/pack.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "sluice/parallel/collectives.h"

namespace sluice {

namespace {

Tensor copied(const std::vector<std::int64_t>& values, at::ScalarType type, at::Device device) {
  return at::tensor(values, type).to(device, /*non_blocking=*/true);
}

}  // namespace

Tensor int64s(const std::vector<std::int64_t>& values, at::Device device) { return copied(values, kLong, device); }
Tensor int32s(const std::vector<std::int64_t>& values, at::Device device) { return copied(values, kInt, device); }

Tensor cu_seqlens_of(const std::vector<std::int64_t>& lengths, at::Device device) {
  std::vector<std::int64_t> bounds{0};
  for (const auto length : lengths) bounds.push_back(bounds.back() + length);
  return int32s(bounds, device);
}

std::int64_t Pack::longest() const { return std::ranges::max(lengths); }

Pack make_pack(std::vector<std::int64_t> lengths, std::vector<std::int64_t> past, std::vector<std::int64_t> slots,
               at::Device device) {
  assert(past.empty() || past.size() == lengths.size());
  assert(slots.size() == past.size());
  std::vector<std::int64_t> positions, row_slots, seen;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const auto first = past.empty() ? 0 : past[n];
    for (std::int64_t i = 0; i < lengths[n]; ++i) positions.push_back(first + i);
    if (slots.empty()) continue;
    row_slots.insert(row_slots.end(), lengths[n], slots[n]);
    seen.push_back(past[n] + lengths[n]);
  }
  auto cu_seqlens = cu_seqlens_of(lengths, device);
  Pack pack{.lengths = std::move(lengths),
            .past = std::move(past),
            .slots = std::move(slots),
            .cu_seqlens = std::move(cu_seqlens),
            .positions = int64s(positions, device)};
  if (!pack.slots.empty()) {
    pack.slot_index = int64s(pack.slots, device);
    pack.row_slots = int64s(row_slots, device);
    pack.seen = int32s(seen, device);
  }
  return pack;
}

Tensor gather_tokens(const Tensor& x, const ForwardContext& context) {
  return all_gather_rows(x, context.split.rows, context.mesh.tp());
}

Tensor scatter_tokens(const Tensor& x, const ForwardContext& context) {
  return reduce_scatter_rows(x, context.split.rows, context.mesh.tp());
}

}  // namespace sluice
