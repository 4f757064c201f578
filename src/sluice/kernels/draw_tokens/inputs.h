// SPDX-License-Identifier: Apache-2.0
// The operator's arguments, checked.
#pragma once

#include <optional>

#include "sluice/core/error.h"
#include "sluice/core/tensor.h"
#include "sluice/kernels/draw_tokens/settings.h"

namespace sluice {

// Shapes, types and sizes, on any device; no values are read.
inline void check_draw_tokens(const Tensor& logits, std::int64_t drawable, const Tensor& settings,
                              const std::optional<Tensor>& seen) {
  constexpr auto op = "draw_tokens";
  SLUICE_CHECK(logits.dim() == 2 && drawable >= 1 && drawable <= logits.size(1),
               "{}: logits must be [N, V] with 1 <= drawable <= V; got {} and drawable {}", op, describe(logits),
               drawable);
  SLUICE_CHECK(settings.dim() == 2 && settings.size(0) == logits.size(0) && settings.size(1) == kDrawSettings &&
                   settings.scalar_type() == kDouble,
               "{}: settings must be float64 [N={}, {}]; got {}", op, logits.size(0), kDrawSettings,
               describe(settings));
  SLUICE_CHECK(!seen || (seen->dim() == 2 && seen->size(0) == logits.size(0) && seen->size(1) == drawable &&
                         seen->scalar_type() == at::kBool),
               "{}: seen must be bool [N={}, drawable={}]; got {}", op, logits.size(0), drawable, describe(*seen));
}

}  // namespace sluice
