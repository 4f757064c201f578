// SPDX-License-Identifier: Apache-2.0
// How what a part of a block gives goes back into several residual streams (hyper-connections, Zhu et al. 2024, arXiv
// 2409.19606; gated as in Qwen3.8-Flash-Next): each takes it with a gate of its own.
//   out_s = residual_s + 2 sigmoid(gate_s) y
// One pass over memory in each direction. T tokens, n streams, D features.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// All of one dtype: float32, bfloat16 or float64. Result [T, n, D]; arithmetic in float32, or float64 when the inputs
// are, and one rounding at the end. Differentiable in all three; the gradient of residual is that of the result itself.
// On a GPU at most 64 streams.
// Error against the float64 definition, relative per tensor: float32 2e-6, bfloat16 3.91e-3.
Tensor stream_inject(const Tensor& residual,  // [T, n, D]
                     const Tensor& y,         // [T, D]
                     const Tensor& gate);     // [T, n]

// The equation above in ATen, for any float type: what the words mean.
Tensor stream_inject_definition(const Tensor& residual, const Tensor& y, const Tensor& gate);

}  // namespace sluice
