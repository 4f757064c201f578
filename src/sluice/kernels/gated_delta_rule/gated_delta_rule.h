// SPDX-License-Identifier: Apache-2.0
// Gated delta rule, causal, over packed sequences (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks").
// Per value head, with state S in R^{K x V}, in this order:
//   S <- exp(g_t) S                          decay
//   S <- S + k_t (beta_t (v_t - S^T k_t))^T  write what the decayed state did not predict
//   o_t = scale * S^T q_t                    read after the write
// Value head h uses key head h / (Hv / Hk). S starts as initial_state, or zero, at every sequence's first token.
//
// T tokens of all sequences, Hk key heads, Hv value heads (Hv % Hk == 0), K key dim, V value dim, N sequences.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

struct GatedDeltaOutput {
  Tensor out;          // [T, Hv, V], dtype of v
  Tensor final_state;  // [N, Hv, K, V], float32 (float64 when v is); [0, Hv, K, V] when not wanted
  Tensor checkpoints;  // what the backward pass takes besides the inputs, in a form of the device's own
};

// float32, bfloat16 or float64 inputs; products and state are float32, or float64 when v is.
// Differentiable in q, k, v, g, beta and initial_state, through both outputs.
// Error against the float64 definition: float32 1e-5, bfloat16 5e-3 (outputs) and 1e-2 (gradients), relative per
// tensor.
GatedDeltaOutput gated_delta_rule(
    const Tensor& q,                             // [T, Hk, K]
    const Tensor& k,                             // [T, Hk, K], dtype of q
    const Tensor& v,                             // [T, Hv, V], dtype of q
    const Tensor& g,                             // [T, Hv], float32 or float64: log decay, <= 0
    const Tensor& beta,                          // [T, Hv], dtype of g: write strength in [0, 1]
    const Tensor& cu_seqlens,                    // [N + 1] int32: 0, end of each sequence, last T
    const std::optional<Tensor>& initial_state,  // [N, Hv, K, V] as final_state; none: zero
    double scale,                                // on q, usually K^-1/2
    bool qk_l2norm,                              // divide each q and k by sqrt(sum of squares + 1e-6) first
    bool output_final_state = true);             // of thousands of sequences it is gigabytes

// The rule in two steps, which on a GPU with few heads may have other bits than the whole: first what depends on
// neither v nor the states, in a form of the device's own, on a GPU 13 KiB a token of 48 value heads; then the rest,
// also several times with other v and initial_state. Takes no part in autograd, and leaves no checkpoints:
// GatedDeltaBackward needs none.
Tensor gated_delta_rule_prepare(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                const Tensor& cu_seqlens, double scale, bool qk_l2norm);
GatedDeltaOutput gated_delta_rule_prepared(const Tensor& prepared, const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                           const std::optional<Tensor>& initial_state, double scale, bool qk_l2norm,
                                           bool output_final_state);

// The rule for sequences whose states live in a cache, while sampling: sequence n begins with states[slots[n]] and
// leaves its final state there. Sequences of a few tokens are computed where the states lie, on a GPU without waiting
// for anything; longer ones through copies. Takes no part in autograd. Errors as above; of few tokens the state's is
// float32's.
Tensor gated_delta_rule_cached(  // out [T, Hv, V], dtype of v
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
    const Tensor& slots,      // [N] int64, rising
    Tensor& states,           // [S, Hv, K, V] as final_state, dense; those of other slots stay as they are
    std::int64_t max_seqlen,  // tokens of the longest sequence, at least
    double scale, bool qk_l2norm);

// The gradients for a layer that lays out its own: those of q, k and v are written to grad_q, grad_k and grad_v, of
// their shapes and dtype with dense heads and any stride between tokens, which may be q, k and v themselves. Takes no
// part in autograd.
struct GatedDeltaGradients {
  Tensor g, beta, initial_state;  // initial_state: zeros where there was none
};
GatedDeltaGradients gated_delta_rule_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_final_state,
                                              const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                              const Tensor& beta, const Tensor& cu_seqlens,
                                              const std::optional<Tensor>& initial_state, const Tensor& checkpoints,
                                              double scale, bool qk_l2norm, Tensor& grad_q, Tensor& grad_k,
                                              Tensor& grad_v);

// The same in two steps (bits as above), of which the first needs no gradient of the final state. Holds intermediate
// results of all tokens between the steps, on a GPU 84 KiB a token of 48 value heads.
class GatedDeltaBackward {
 public:
  // from_zero: the first step also gives the gradient of the initial state, as if that of the final state were zero.
  GatedDeltaBackward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                     const Tensor& beta, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
                     double scale, bool qk_l2norm, bool from_zero);
  const Tensor& grad_initial_state() const { return grad_initial_state_; }  // [N, Hv, K, V]; [0] unless from_zero

  // The second step, once; without grad_final_state that is zero. Gradients of q, k and v go where those of
  // gated_delta_rule_backward do; returns those of g and beta.
  std::pair<Tensor, Tensor> finish(const std::optional<Tensor>& grad_final_state, Tensor& grad_q, Tensor& grad_k,
                                   Tensor& grad_v);

 private:
  Tensor grad_out_, q_, k_, v_, g_, beta_, cu_seqlens_;
  std::optional<Tensor> initial_state_;
  double scale_;
  bool qk_l2norm_;
  Tensor grad_initial_state_;
  std::vector<Tensor> kept_;
};

// The equation above, token by token, in ATen, for any float type: what the words mean. Slow.
GatedDeltaOutput gated_delta_rule_definition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                             const Tensor& beta, const Tensor& cu_seqlens,
                                             const std::optional<Tensor>& initial_state, double scale, bool qk_l2norm,
                                             bool output_final_state = true);

}  // namespace sluice
