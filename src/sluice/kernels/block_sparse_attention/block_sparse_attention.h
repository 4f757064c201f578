// SPDX-License-Identifier: Apache-2.0
// Softmax attention of each query to some blocks of the keys that it sees, over packed sequences, with grouped heads
// and an optional cache of keys and values (the sparse half of Qwen3.8-Flash-Next's attention; block_top_k makes the
// choice). The keys of a sequence are cut into blocks of c from its first one on. Query i of a sequence with Lq queries
// and Lk keys sees m_i = Lk - Lq + i + 1 of them; it attends to the set S_i of
//   the keys c b .. c b + c - 1 of each block b that is chosen for it, and the open tail c floor(m_i / c) .. m_i - 1:
//   out_i = sum over j in S_i of p_ij v_j    p_ij = softmax_j(scale * q_i . k_j)
// per query head h, with kv head h / (Hq / Hkv); the heads of a query share its set. An empty set gives zero.
//
// Tq query tokens and Tk key rows of N sequences, Hq query heads, Hkv kv heads (Hq % Hkv == 0), d key dim, dv value
// dim, K blocks at most for a query.
#pragma once

#include <optional>

#include "sluice/core/tensor.h"

namespace sluice {

// Sequences, caches, dtypes and the accumulation type are as in attention/attention.h. Differentiable in q, k and v;
// there the sequences' keys must not overlap. Rows that no query attends to get gradient zero. Work and memory are
// linear in Tq and in the number of attended keys; nothing of size Tq x Tk is made. The same inputs give the same bits,
// and a sequence the same bits in every pack; on the CPU a query has the same bits with a cache or without. Error
// against the float64 definition, relative per tensor: float32 2e-6, gradients 2e-5; bfloat16 4e-3, gradients 8e-3.
//
// On a GPU there are kernels (Hopper) for bfloat16 with d = dv, 128 or 256, blocks of 4 keys, at most 48 query heads a
// kv head and a positive scale. They do not wait for the device, so wrong boundaries or blocks stop the program with a
// message. Memory beside the results: 8 bytes for each of Tq (K + 1) blocks, and 8 for each query and head backward.
// Anything else takes a plain path, and the log says so once; its work is that of dense attention.
Tensor block_sparse_attention(               // [Tq, Hq, dv], dtype of q
    const Tensor& q,                         // [Tq, Hq, d]
    const Tensor& k,                         // [Tk, Hkv, d], dtype of q
    const Tensor& v,                         // [Tk, Hkv, dv], dtype of q
    const Tensor& blocks,                    // [Tq, K] int32: complete blocks that the query sees, rising, then -1
    std::int64_t block_size,                 // keys of a block, c >= 1
    const Tensor& cu_seqlens_q,              // [N + 1] int32: 0, end of each sequence, last Tq
    const Tensor& cu_seqlens_k,              // [N + 1] int32: 0, end of each sequence, last Tk
    const std::optional<Tensor>& seqused_k,  // [N] int32: keys of each sequence, where they lie in slabs
    double scale);                           // usually d^-1/2

// The words above, sequence by sequence, in ATen, for any float type. Builds Lq x Lk scores.
Tensor block_sparse_attention_definition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                         std::int64_t block_size, const Tensor& cu_seqlens_q,
                                         const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
                                         double scale);

}  // namespace sluice
