// SPDX-License-Identifier: Apache-2.0
// The gates of the gated delta rule from their projections (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"; the
// decay as in Gu, Dao 2023, "Mamba"):
//   g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)
// T tokens, H value heads.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

struct DeltaGates {
  Tensor g;     // [T, H], log decay, <= 0; float32, or float64 when a is: small decays vanish in bfloat16
  Tensor beta;  // [T, H], write strength in [0, 1], as g
};

// a and b float32, bfloat16 or float64, any strides. Differentiable in all four. The gradients of A_log and dt_bias are
// summed over the tokens in float32 (float64), in an order that depends on T alone.
// Error against the float64 definition, relative per tensor: float32 1e-6; bfloat16 the same for g, beta and the
// parameters' gradients, 4e-3 for those of a and b, which are rounded.
DeltaGates delta_gates(const Tensor& a,         // [T, H]
                       const Tensor& b,         // [T, H], dtype of a
                       const Tensor& A_log,     // [H], float32 (float64)
                       const Tensor& dt_bias);  // [H], as A_log

// The gradients for a layer that lays out its own: those of a and b are written to grad_a and grad_b, of their shape
// and dtype with neighbouring heads, which may be a and b themselves. Takes no part in autograd.
struct DeltaGatesGradients {
  Tensor A_log, dt_bias;
};
DeltaGatesGradients delta_gates_backward(const Tensor& grad_g, const Tensor& grad_beta, const Tensor& a,
                                         const Tensor& b, const Tensor& A_log, const Tensor& dt_bias, Tensor& grad_a,
                                         Tensor& grad_b);

// The equations above in ATen, for any float type: what the words mean.
DeltaGates delta_gates_definition(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias);

}  // namespace sluice
