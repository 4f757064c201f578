// SPDX-License-Identifier: Apache-2.0
// Rows of a state that belong to sequences, each of which has a slot of it.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// states [S, ...] to [N, ...]: the rows of `slots` [N] int64, which rise. A view where they are all of them.
inline Tensor read_slots(const Tensor& states, const Tensor& slots) {
  return slots.size(0) == states.size(0) ? states : states.index_select(0, slots);
}

// Puts `rows` [N, ...] in their places.
inline void write_slots(Tensor& states, const Tensor& slots, const Tensor& rows) {
  if (slots.size(0) == states.size(0)) {
    states.copy_(rows);
  } else {
    states.index_copy_(0, slots, rows);
  }
}

}  // namespace sluice
