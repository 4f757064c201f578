// SPDX-License-Identifier: Apache-2.0
// Which blocks of keys each query attends to: the choice of a sparse attention's indexer (Qwen3.8-Flash-Next; the idea
// of a light indexer in front of attention is DeepSeek-V3.2's, 2025). The keys of a sequence are cut into blocks of c
// from its first one on, and each complete block has one index key. For query i of a sequence with Lq queries and Lk
// keys, which sees the keys 0 .. Lk - Lq + i and so n_i = floor((Lk - Lq + i + 1) / c) complete blocks:
//   score_ib = scale * sum over heads h of max(0, q_ih . block_key_b)     for b < n_i
// It takes the min(top_k, n_i) blocks of the highest scores; of equal ones, which max(0, ..) makes common, the lower.
//
// Tq query tokens of N sequences, H index heads, d index dim, B rows of block keys.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// Result [Tq, top_k] int32: the blocks of each query, counted from its sequence's first, in rising order; -1 after the
// last. Sequence n has the queries cu_seqlens_q[n] .. cu_seqlens_q[n + 1], seqused_k[n] keys and the block keys of the
// floor(seqused_k[n] / block_size) rows from cu_blocks[n] on; nothing else of cu_blocks counts, so a cache with a slab
// of rows for each sequence is passed as it is. float32, bfloat16 or float64; scores are float32, or float64 when q is,
// and their bits depend on the query and the block key alone: a choice is the same in every pack, and whether the keys
// come at once or through a cache. A product that is not a number counts as 0. Memory beside the result: one score a
// block for each thread. Not differentiable.
//
// On a GPU there is a kernel for bfloat16, d 32, 64 or 128, H 1, 2, 4 or 8 and sequences of up to 56,320 blocks; it
// takes no memory beside the result, and wrong boundaries stop the program with a message. Anything else takes a plain
// path, whose scores may change a last bit with the pack, and the log says so once.
Tensor block_top_k(const Tensor& q,             // [Tq, H, d]
                   const Tensor& block_keys,    // [B, d], dtype of q
                   const Tensor& cu_seqlens_q,  // [N + 1] int32: 0, end of each sequence, last Tq
                   const Tensor& cu_blocks,     // [N + 1] int32: first row of each sequence's blocks, last B
                   const Tensor& seqused_k,     // [N] int32: keys of each sequence, those of its queries among them
                   std::int64_t block_size,     // keys of a block, c >= 1
                   std::int64_t top_k,          // >= 1
                   double scale);               // > 0, usually d^-1/2

// The words above, query by query, in ATen, for any float type. Slow.
Tensor block_top_k_definition(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q,
                              const Tensor& cu_blocks, const Tensor& seqused_k, std::int64_t block_size,
                              std::int64_t top_k, double scale);

}  // namespace sluice
