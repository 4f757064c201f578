// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/block_top_k/block_top_k.h"
#include "sluice/kernels/block_top_k/inputs.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {

Tensor block_top_k_definition(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q,
                              const Tensor& cu_blocks, const Tensor& seqused_k, std::int64_t block_size,
                              std::int64_t top_k, double scale) {
  const auto type = wide_type(q.scalar_type());
  auto chosen = at::full({q.size(0), top_k}, -1, q.options().dtype(kInt));
  for (const auto& s : block_sequences(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size)) {
    for (std::int64_t i = 0; i < s.q_count; ++i) {
      const auto count = s.blocks(i), taken = std::min(top_k, count);
      const auto keys = block_keys.narrow(0, s.block_begin, count).to(type);  // [n_i, d]
      const auto products = keys.matmul(q[s.q_begin + i].to(type).t());       // [n_i, H]
      const auto scores = products.relu().nan_to_num(0).sum(1) * scale;
      const auto best = std::get<1>(scores.sort(/*stable=*/true, 0, /*descending=*/true)).narrow(0, 0, taken);
      chosen[s.q_begin + i].narrow(0, 0, taken).copy_(std::get<0>(best.sort()));
    }
  }
  return chosen;
}

}  // namespace sluice
