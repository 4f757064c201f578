// SPDX-License-Identifier: Apache-2.0
// Short causal depthwise convolution over packed sequences, then the activation. Per channel c and token t of a
// sequence, with u the W - 1 inputs before the sequence followed by its tokens:
//   y_t = a(sum over j < W of weight[c, j] u_{t - (W - 1) + j}),   a = silu or identity
// weight[c, W - 1] meets the token itself. No bias. The inputs before a sequence are initial_state, or zero.
//
// T tokens of all sequences, C channels, W width (1 and more), N sequences.
#pragma once

#include <optional>

#include "sluice/core/tensor.h"

namespace sluice {

struct CausalConvOutput {
  Tensor out;          // [T, C], dtype of x
  Tensor final_state;  // [N, C, W - 1], dtype of x, oldest first: the last W - 1 of u, so a sequence shorter than W - 1
                       // still holds the tail of its initial state
};

// x float32, bfloat16 or float64; any stride between tokens without a copy. Sums in float32, or float64 when x is.
// Differentiable in x, weight and initial_state, through both outputs. The weight's gradient is summed in the
// accumulation type, in an order that depends on T alone, then cast.
// Error against the float64 definition, relative per tensor: float32 1e-6, bfloat16 4e-3.
CausalConvOutput causal_conv(const Tensor& x,                             // [T, C]
                             const Tensor& weight,                        // [C, 1, W], dtype of x or float32
                             const Tensor& cu_seqlens,                    // [N + 1] int32: 0, end of each, last T
                             const std::optional<Tensor>& initial_state,  // as final_state; none: zero
                             bool silu);

// The convolution for sequences whose states live in a cache, while sampling: states[slots[n]] is the initial state of
// sequence n, and its final state takes that place. Sequences of a few tokens are computed where the states lie, on a
// GPU without waiting for anything; longer ones through copies. The same errors. Takes no part in autograd.
Tensor causal_conv_cached(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,  // out [T, C], dtype of x
                          const Tensor& slots,                                              // [N] int64, rising
                          Tensor& states,           // [S, C, W - 1], dtype of x, dense; others stay as they are
                          std::int64_t max_seqlen,  // tokens of the longest sequence, at least
                          bool silu);

// The gradients for a layer that lays out its own: that of x is written to grad_x, of x's shape and dtype, with any
// stride between tokens, which may be x itself. Takes no part in autograd.
struct CausalConvGradients {
  Tensor weight, initial_state;  // initial_state: zeros where there was none
};
CausalConvGradients causal_conv_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_final_state,
                                         const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                         const std::optional<Tensor>& initial_state, bool silu, Tensor& grad_x);

// The equation above, sequence by sequence, in ATen, for any float type: what the words mean. Slow.
CausalConvOutput causal_conv_definition(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                        const std::optional<Tensor>& initial_state, bool silu);

}  // namespace sluice
