// SPDX-License-Identifier: Apache-2.0
// Rows of a layer state that belong to the sequences of a pack.
#pragma once

#include "sluice/layers/pack.h"

namespace sluice {

// state [slots, ...] to [N, ...]: the rows of the pack's slots. A view where they are all of them.
Tensor read_slots(const Tensor& state, const Pack& pack);

// Puts `rows` [N, ...] back in their places.
void write_slots(Tensor& state, const Pack& pack, const Tensor& rows);

}  // namespace sluice
