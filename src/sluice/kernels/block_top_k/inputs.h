// SPDX-License-Identifier: Apache-2.0
// The operator's arguments, checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

struct BlockSequence {
  std::int64_t q_begin, q_count, block_begin, key_count, block_size;
  // Complete blocks that query i sees.
  std::int64_t blocks(std::int64_t query) const {
    return std::max<std::int64_t>(0, key_count - q_count + query + 1) / block_size;
  }
};

// Shapes, types and sizes, on any device; no values are read.
void check_block_top_k(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
                       const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale);

// The sequences of a pack in CPU memory, checked against the rows of q and block_keys.
std::vector<BlockSequence> block_sequences(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q,
                                           const Tensor& cu_blocks, const Tensor& seqused_k, std::int64_t block_size);

}  // namespace sluice
