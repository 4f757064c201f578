// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/slots.h"

namespace sluice {
namespace {

// Slots rise, so as many as there are means all of them in order.
bool all_slots(const Tensor& state, const Pack& pack) {
  return static_cast<std::int64_t>(pack.slots.size()) == state.size(0);
}

}  // namespace

Tensor read_slots(const Tensor& state, const Pack& pack) {
  return all_slots(state, pack) ? state : state.index_select(0, pack.slot_index);
}

void write_slots(Tensor& state, const Pack& pack, const Tensor& rows) {
  if (all_slots(state, pack)) {
    state = rows;
  } else {
    state.index_copy_(0, pack.slot_index, rows);
  }
}

}  // namespace sluice
