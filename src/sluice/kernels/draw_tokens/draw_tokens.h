// SPDX-License-Identifier: Apache-2.0
// A token for each row of logits z, drawn with the row's own settings (settings.h). Of the first `drawable` ids:
//   s = z, but of ids that were seen z / penalty if z > 0, else z * penalty (Keskar et al. 2019, "CTRL")
//   w = exp((s - max s) / temperature)
// of which stay, each filter acting on what the one before left:
//   top-k   the k largest; ids that tie with the k-th stay
//   top-p   the fewest, largest first, whose share of the weights together reaches p; of equal ones the lowest ids; at
//           least one (Holtzman et al. 2020, "The curious case of neural text degeneration")
//   min-p   those with w >= min_p (Nguyen et al. 2024, "Turning up the heat: min-p sampling")
// The token is the first one, ids in rising order, through which the sum of the weights passes random * their total.
//
// N rows, V logits a row.
#pragma once

#include <optional>

#include "sluice/core/tensor.h"
#include "sluice/kernels/draw_tokens/settings.h"

namespace sluice {

// Result [N, 3] float64: a DrawnToken a row, log-probabilities within 5e-6. A random number that falls between two ids
// within the rounding of float32 exponentials may pick either. Logits of minus infinity are never drawn; where a row
// holds another number that is not finite, or nothing else among the drawable, both its log-probabilities are NaN.
// The settings' values are trusted. Not differentiable.
//
// On a GPU float32 or bfloat16; scores and exponentials are float32. A row's bits do not depend on the others, nor on
// how many there are. The host waits for nothing.
Tensor draw_tokens(const Tensor& logits,                // [N, V] float32, bfloat16 or float64
                   std::int64_t drawable,               // from 1 to V
                   const Tensor& settings,              // [N, 6] float64: a DrawSettings a row
                   const std::optional<Tensor>& seen);  // [N, drawable] bool: ids under the penalty; none: no penalty

// The words above in ATen, in float64. Slow.
Tensor draw_tokens_definition(const Tensor& logits, std::int64_t drawable, const Tensor& settings,
                              const std::optional<Tensor>& seen);

}  // namespace sluice
