// SPDX-License-Identifier: Apache-2.0
// Softmax attention, causal, over packed sequences, with grouped heads and an optional cache of keys and values.
// Per query head h with kv head h / (Hq / Hkv), for query i of a sequence with Lq queries and Lk keys:
//   out_i = sum_j p_ij v_j    p_ij = softmax_j(scale * q_i . k_j) over j = 0 .. Lk - Lq + i
// The last query sees every key: new queries attend to a cache and to themselves. A query before the first key (Lk <
// Lq) sees none; its output is zero.
//
// Tq query tokens and Tk key rows of N sequences, Hq query heads, Hkv kv heads (Hq % Hkv == 0), d key dim, dv value
// dim. Names of the arguments are those of FlashAttention's varlen interface.
#pragma once

#include <cstdint>
#include <optional>

#include "sluice/core/tensor.h"

namespace sluice {

// Sequence n has the queries cu_seqlens_q[n] .. cu_seqlens_q[n + 1] and the keys cu_seqlens_k[n] .. cu_seqlens_k[n +
// 1]. With seqused_k only the first seqused_k[n] rows from cu_seqlens_k[n] on are keys, and nothing else of
// cu_seqlens_k counts: a cache with a slab of rows for each sequence is passed as it is, with gaps, its slabs in any
// order. Differentiable in q, k and v; there the sequences' keys must not overlap. Rows that are no key get gradient
// zero. float32, bfloat16 or float64; scores, softmax and sums are float32, or float64 when q is. Error against the
// float64 definition: float32 2e-6, bfloat16 5e-3, gradients 2e-5 and 1e-2, relative per tensor. Memory beside the
// results is linear in the tokens. The same inputs give the same bits; on the CPU a sequence has the same bits in every
// pack. The longest lengths are the host's knowledge of boundaries that lie on a GPU. There bfloat16 with d = dv, a
// multiple of 8 up to 256, takes flash attention; anything else a plain path, and the log says so once.
Tensor attention(                            // [Tq, Hq, dv], dtype of q
    const Tensor& q,                         // [Tq, Hq, d]
    const Tensor& k,                         // [Tk, Hkv, d], dtype of q
    const Tensor& v,                         // [Tk, Hkv, dv], dtype of q
    const Tensor& cu_seqlens_q,              // [N + 1] int32: 0, end of each sequence, last Tq
    const Tensor& cu_seqlens_k,              // [N + 1] int32: 0, end of each sequence, last Tk
    const std::optional<Tensor>& seqused_k,  // [N] int32: keys of each sequence
    std::int64_t max_seqlen_q,               // at least the queries of the longest sequence
    std::int64_t max_seqlen_k,               // at least the keys of the longest sequence
    double scale);                           // usually d^-1/2

// Whether the host never waits for a GPU in attention(), with q in `dtype`.
bool attention_never_waits(at::ScalarType dtype, std::int64_t key_dim, std::int64_t value_dim);

// The equation above, sequence by sequence, in ATen, for any float type: what the words mean. Builds Lq x Lk scores.
Tensor attention_definition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                            const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k, double scale);

}  // namespace sluice
