// SPDX-License-Identifier: Apache-2.0
// What a gated delta layer does between its projections: convolution, gates, recurrence, gated norm. The tokens of a
// pack may lie in pieces on several ranks, which tell one another what stands before their first token.
#pragma once

#include "sluice/core/tensor.h"
#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"
#include "sluice/layers/pack.h"

namespace sluice {

// Hk key heads, Hv value heads, K and V their dims; Kd = Hk K, Vd = Hv V.
struct GatedDeltaCoreSizes {
  std::int64_t num_key_heads, num_value_heads, key_head_dim, value_head_dim;
  double rms_norm_eps;
  GateActivation output_gate;
};

struct GatedDeltaCoreWeights {
  const Tensor& conv;     // [2 Kd + Vd, 1, W]
  const Tensor& A_log;    // [Hv]
  const Tensor& dt_bias;  // [Hv]
  const Tensor& norm;     // [V]
};

// `projection` [T, 2 Kd + 2 Vd + 2 Hv]: q | k | v | z | b | a of each token of this rank's piece of the pack
// (pieces_of() over `ranks`). Gives [T, Vd] in its dtype. Differentiable in it and in the weights. One step for
// autograd, in which every gradient takes the place of the value that it belongs to: the projection becomes its own
// gradient. So backward may run only once; PyTorch refuses a second time. No device is waited for.
Tensor gated_delta_core(const Tensor& projection, const GatedDeltaCoreWeights& weights, const Pack& pack,
                        const Group& ranks, const GatedDeltaCoreSizes& sizes);

// What sampling keeps of every slot's sequence.
struct GatedDeltaCoreStates {
  Tensor conv;       // [slots, 2 Kd + Vd, W - 1]
  Tensor recurrent;  // [slots, Hv, K, V] float32
};

// The same for a pack that continues the sequences of its slots, in one process; their states go on in place. Takes no
// part in autograd.
Tensor gated_delta_core_cached(const Tensor& projection, const GatedDeltaCoreWeights& weights, const Pack& pack,
                               GatedDeltaCoreStates& states, const GatedDeltaCoreSizes& sizes);

}  // namespace sluice
