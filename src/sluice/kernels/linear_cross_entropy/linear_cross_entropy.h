// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a linear output layer over a large vocabulary. With logits x_t = logit_scale W h_t of token t and
// their softmax p_t:
//   nll_t = log sum_i exp(x_ti) - x_t,target(t)    predicted_t = argmax_i x_ti    entropy_t = -sum_i p_ti log p_ti
// The logits [T, V] are never held, only a tile of them; backward computes them again.
//
// The vocabulary may be split: `weight` has some of its rows, and a target among the others is -1. Then nll and entropy
// are of the softmax over these rows, x_t,target counting as 0 where it is elsewhere; lse, the log of the sum, is what
// joins the parts, and backward with the lse of all rows gives the gradients of these (layers/vocabulary.h).
//
// T tokens, D hidden size, V vocabulary size.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

struct LinearCrossEntropyOutput {
  Tensor nll;        // [T] float32 (float64 when hidden is): -log softmax(hidden weight^T)[target]; 0 where ignored
  Tensor predicted;  // [T] int64: id of the largest logit, the first of equal ones; -100 where ignored
  Tensor entropy;    // [T] dtype of nll, in nats; 0 where ignored; empty unless asked for
  Tensor lse;        // [T] dtype of nll, without gradient: log sum_i exp(x_ti); 0 where ignored
};

// Differentiable in hidden and weight through nll and entropy: of a logit, d entropy_t / d x_ti = -p_ti (log p_ti +
// entropy_t). Ignored tokens cost nothing and add exactly 0 to both gradients; a weight that needs none, as under LoRA,
// costs no product.
// A target that is neither -100 nor -1 nor an id is an error that names its position.
// float32, bfloat16 or float64; logits, softmax and sums are float32, or float64 when hidden is.
// `logit_scale` must be above 0: 1 / temperature for the distribution that a sampler draws from.
// Error against the float64 definition, relative per tensor: float32 nll 2e-6, entropy and gradients 2e-5; bfloat16 nll
// 2e-6 and entropy 2e-5 (the logits are not rounded to bfloat16), gradients 5e-3.
// Memory beside the results, on a CPU: 32 MiB of logits (48 MiB in bfloat16), at most 32 MiB (48 MiB) of the weight's
// gradient, and what is linear in T x D: a copy of the counted hidden rows, its transpose and, in bfloat16, a float32
// gradient. On a GPU: 4 GiB of logits (6 GiB in bfloat16) and a float32 gradient of the weight. There nothing waits for
// the device: a target that is no id gives the nll NaN, not an error.
LinearCrossEntropyOutput linear_cross_entropy(const Tensor& hidden,   // [T, D]
                                              const Tensor& weight,   // [V, D], dtype of hidden
                                              const Tensor& targets,  // [T] int64; -100 = ignored, -1 = elsewhere
                                              double logit_scale = 1, bool entropy = false);

// The gradients of `hidden` and `weight` for that of nll, [T] of its dtype, by the lse of the whole vocabulary. Without
// `weight_gradient` the second is empty and costs nothing.
struct LinearCrossEntropyGradients {
  Tensor hidden, weight;
};
LinearCrossEntropyGradients linear_cross_entropy_backward(const Tensor& grad_nll, const Tensor& hidden,
                                                          const Tensor& weight, const Tensor& targets,
                                                          const Tensor& lse, double logit_scale = 1,
                                                          bool weight_gradient = true);

struct LinearCrossEntropyLoss {
  Tensor loss;       // scalar, dtype of nll: sum over tokens of loss_weight_t nll_t
  Tensor predicted;  // as above
};

// The weighted sum that training descends, with logit_scale 1, differentiable in hidden and weight. Where a gradient
// may be asked for, it is computed with the loss, so that the logits are computed once; backward scales it.
LinearCrossEntropyLoss linear_cross_entropy_loss(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                 const Tensor& loss_weight);  // [T], dtype of nll

// The equation above in ATen, for any float type: what the words mean. Holds all logits.
LinearCrossEntropyOutput linear_cross_entropy_definition(const Tensor& hidden, const Tensor& weight,
                                                         const Tensor& targets, double logit_scale = 1,
                                                         bool entropy = false);

}  // namespace sluice
