// SPDX-License-Identifier: Apache-2.0
// What a part of a block reads of several residual streams (hyper-connections, Zhu et al. 2024, arXiv 2409.19606; gated
// as in Qwen3.8-Flash-Next): their mean, each element weighed by a gate of its own.
//   y = 1/n sum over s of sigmoid(gate_s) * x_s
// One pass over memory in each direction. T tokens, n streams, D features.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// x, gate [T, n, D], of one dtype: float32, bfloat16 or float64. Result [T, D]; arithmetic in float32, or float64 when
// the inputs are, and one rounding at the end. Differentiable in both.
// Error against the float64 definition, relative per tensor: float32 1e-6, bfloat16 3.91e-3.
Tensor stream_mix(const Tensor& x, const Tensor& gate);

// The equation above in ATen, for any float type: what the words mean.
Tensor stream_mix_definition(const Tensor& x, const Tensor& gate);

}  // namespace sluice
