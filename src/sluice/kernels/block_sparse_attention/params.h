// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code: what the Hopper kernels need, as plain pointers and sizes.
// Tq queries, Tk rows of keys, n sequences, Hq query heads, Hkv kv heads (Hq % Hkv == 0), d key and value dim.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace sluice {

struct BlockSparseAttentionParams {
  const __nv_bfloat16* q;       // [Tq, Hq, d]
  const __nv_bfloat16* k;       // [Tk, Hkv, d]
  const __nv_bfloat16* v;       // [Tk, Hkv, d]
  const int32_t* blocks;        // [Tq, top_k], rising, then -1
  const int32_t* cu_seqlens_q;  // [n + 1]
  const int32_t* cu_seqlens_k;  // [n + 1]
  const int32_t* seqused_k;     // [n], or null: then the keys of a sequence end where cu_seqlens_k says
  int32_t q_tokens, k_tokens, sequences, heads, kv_heads, dim, top_k;
  int64_t q_stride, k_stride, v_stride;  // elements between tokens; within a token the heads are dense
  float scale;
  void* workspace;  // block_sparse_attention_workspace_bytes, aligned to 16 bytes

  __nv_bfloat16* out;  // [Tq, Hq, d]
  float* lse;          // [Tq, Hq]
};

struct BlockSparseAttentionBackwardParams {
  BlockSparseAttentionParams forward;  // its out and lse are read; workspace of the backward's size
  const __nv_bfloat16* grad_out;       // [Tq, Hq, d]
  int64_t grad_out_stride;             // elements between tokens, as q_stride

  __nv_bfloat16* grad_q;  // [Tq, Hq, d]
  __nv_bfloat16* grad_k;  // [Tk, Hkv, d]; rows that are no key are not written
  __nv_bfloat16* grad_v;  // [Tk, Hkv, d]; likewise
};

size_t block_sparse_attention_workspace_bytes(const BlockSparseAttentionParams& params);
size_t block_sparse_attention_backward_workspace_bytes(const BlockSparseAttentionParams& params);

// Blocks of 4 keys, d 128 or 256, at most 48 query heads a kv head, scale > 0; rows start at multiples of 16 bytes.
cudaError_t launch_block_sparse_attention_sm90(const BlockSparseAttentionParams& params, cudaStream_t stream);
cudaError_t launch_block_sparse_attention_backward_sm90(const BlockSparseAttentionBackwardParams& params,
                                                        cudaStream_t stream);

}  // namespace sluice
