// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code: what the kernel needs, as plain pointers and sizes.
// Tq queries of n sequences, H index heads, d index dim, B rows of block keys.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

struct BlockTopKParams {
  const __nv_bfloat16* q;           // [Tq, H, d]
  const __nv_bfloat16* block_keys;  // [B, d], dense
  const int32_t* cu_seqlens_q;      // [n + 1]
  const int32_t* cu_blocks;         // [n + 1]
  const int32_t* seqused_k;         // [n]
  int32_t q_tokens, block_rows, sequences, heads, dim, block_size, top_k;
  int64_t q_stride;  // elements between tokens; within a token the heads are dense
  float scale;

  int32_t* chosen;  // [Tq, top_k]
};

// d 32, 64 or 128, H 1, 2, 4 or 8, at most kBlockTopKMostBlocks blocks of a sequence; rows start at multiples of 16
// bytes.
constexpr int32_t kBlockTopKMostBlocks = 55 * 1024;  // whose scores fill a multiprocessor's shared memory
cudaError_t launch_block_top_k(const BlockTopKParams& params, cudaStream_t stream);

}  // namespace sluice
