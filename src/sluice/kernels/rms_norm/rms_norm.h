// SPDX-License-Identifier: Apache-2.0
// Root mean square norm over the last dim (Zhang, Sennrich 2019):
//   x_hat = x / sqrt(mean(x^2) + eps)
//   zero-centred weight (around 0):  y = cast(x_hat * (1 + w))   one cast, at the end: 1 + w in bfloat16 loses w
//   plain weight (around 1):         y = cast(w * cast(x_hat))   as the reference rounds; no difference in float32
// where cast rounds to the dtype of x.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// x float32, bfloat16 or float64, any strides; arithmetic in float32, or float64 when x is. Result dense, dtype of x.
// Differentiable in x and weight; the inner cast counts as identity. The weight's gradient is summed in the
// accumulation type, in an order that depends on the number of rows and of heads alone, then cast.
// Where the squares of a row overflow, y and the gradient of x are 0.
// Error against the float64 definition, relative per tensor: float32 1e-6, bfloat16 4e-3 (8e-3 with the plain weight).
Tensor rms_norm(const Tensor& x,       // [..., D], or [..., H, D]
                const Tensor& weight,  // [D], or [H, D], one a head; dtype of x or float32
                double eps,            // > 0
                bool zero_centered);

// The equation above in ATen, for any float type: what the words mean. Slow.
Tensor rms_norm_definition(const Tensor& x, const Tensor& weight, double eps, bool zero_centered);

}  // namespace sluice
