// SPDX-License-Identifier: Apache-2.0
// The gated activation between the two projections of a feed-forward (Shazeer 2020, arXiv 2002.05202):
//   y = silu(gate) * up,   silu(x) = x / (1 + e^-x)
// One pass over memory in each direction. T tokens, F features.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// gate, up [T, F], of one dtype: float32, bfloat16 or float64; any strides, so that both may be columns of one
// projection. Result dense [T, F]; arithmetic in float32, or float64 when the inputs are, and one rounding at the end.
// Differentiable in both; the gradients are dense.
// Error against the float64 definition, relative per tensor: float32 1e-6, bfloat16 3.91e-3.
Tensor swiglu(const Tensor& gate, const Tensor& up);

// The equation above in ATen, for any float type: what the words mean.
Tensor swiglu_definition(const Tensor& gate, const Tensor& up);

}  // namespace sluice
