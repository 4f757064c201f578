// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (Su et al. 2021), half-split pairing on the first rd dims of each head; the rest pass:
//   y_j         = x_j cos_j - x_{j + rd/2} sin_j
//   y_{j + rd/2} = x_{j + rd/2} cos_j + x_j sin_j      for j < rd/2
// T tokens, H heads, d head dim, rd rotary dims (even, at most d).
#pragma once

#include <cstdint>

#include "sluice/core/tensor.h"

namespace sluice {

// x float32, bfloat16 or float64, any strides; arithmetic in float32, or float64 when x is; one rounding. Result dense,
// dtype of x. Differentiable in x alone.
// Error against the float64 definition, relative per tensor: float32 1e-6, bfloat16 4e-3.
Tensor rotary(const Tensor& x,     // [T, H, d]
              const Tensor& cos,   // [T, rd/2] float32; float64 too when x is
              const Tensor& sin);  // as cos

// The equation above in ATen, for any float type: what the words mean. Slow.
Tensor rotary_definition(const Tensor& x, const Tensor& cos, const Tensor& sin);

struct RotaryTable {
  Tensor cos, sin;  // [T, rd/2] float32
};

// Angle t, j = positions[t] * theta^(-2j/rd), formed in float32 as the reference forms it: at long context its rounding
// is part of the trained model, so a float64 angle would be another model.
RotaryTable rotary_table(const Tensor& positions,  // [T] int64
                         double theta,             // > 1
                         std::int64_t rotary_dim);

}  // namespace sluice
