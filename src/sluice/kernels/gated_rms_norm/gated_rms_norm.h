// SPDX-License-Identifier: Apache-2.0
// Gated root mean square norm over each head: the norm first, the gate after it, one weight for all heads.
//   y = cast(w * x_hat * a(gate)),   x_hat = x / sqrt(mean(x^2) + eps),   a = silu or sigmoid
// One cast, at the end; the unfused reference also rounds x_hat and w * x_hat, at most an ulp of the dtype apart.
// T tokens, H heads, V value dim.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

enum class GateActivation { kSilu, kSigmoid };  // "silu" and "sigmoid" in torch.ops.sluice.gated_rms_norm

// x float32, bfloat16 or float64, any strides; arithmetic in float32, or float64 when x is. Result dense, dtype of x.
// Differentiable in x, gate and weight. The weight's gradient is summed in the accumulation type, in an order that
// depends on the number of rows alone, then cast.
// Where the squares of a row overflow, y and the gradients of its x and gate are 0.
// Error against the float64 definition, relative per tensor: float32 1e-6, bfloat16 4e-3.
Tensor gated_rms_norm(const Tensor& x,       // [T, H, V]
                      const Tensor& gate,    // [T, H, V], dtype of x
                      const Tensor& weight,  // [V], dtype of x or float32, around 1
                      double eps,            // > 0
                      GateActivation activation);

// The gradients for a layer that lays out its own: those of x and gate are written to grad_x and grad_gate, of their
// shapes and dtype with dense rows, which may be x and gate themselves; that of the weight is returned. Takes no part
// in autograd.
Tensor gated_rms_norm_backward(const Tensor& grad_out, const Tensor& x, const Tensor& gate, const Tensor& weight,
                               double eps, GateActivation activation, Tensor& grad_x, Tensor& grad_gate);

// The equation above in ATen, for any float type: what the words mean. Slow.
Tensor gated_rms_norm_definition(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                                 GateActivation activation);

}  // namespace sluice
