// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/choice.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {

Tensor block_sparse_attention_definition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                         std::int64_t block_size, const Tensor& cu_seqlens_q,
                                         const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
                                         double scale) {
  const auto type = wide_type(q.scalar_type());
  const auto group = q.size(1) / k.size(1);
  const auto by_head = [&](const Tensor& x, std::int64_t begin, std::int64_t count, std::int64_t repeats) {
    return x.narrow(0, begin, count).to(type).transpose(0, 1).repeat_interleave(repeats, 0);  // [Hq, count, width]
  };
  std::vector<Tensor> outputs{at::zeros({0, q.size(1), v.size(2)}, q.options().dtype(type))};
  for (const auto& s : keyed_sequences("block_sparse_attention", q, k, cu_seqlens_q, cu_seqlens_k, seqused_k)) {
    auto hidden = at::ones({s.q_count, s.k_count}, q.options().dtype(at::kBool));
    for (std::int64_t i = 0; i < s.q_count; ++i) {
      for (std::int64_t c = 0; c < blocks.size(1); ++c) {
        const auto block = blocks[s.q_begin + i][c].item<std::int64_t>();
        if (block >= 0) hidden[i].narrow(0, block * block_size, block_size).fill_(false);
      }
      const auto visible = s.visible(i);
      hidden[i].narrow(0, visible / block_size * block_size, visible % block_size).fill_(false);
    }
    const auto queries = by_head(q, s.q_begin, s.q_count, 1), keys = by_head(k, s.k_begin, s.k_count, group),
               values = by_head(v, s.k_begin, s.k_count, group);
    const auto scores = queries.matmul(keys.transpose(1, 2)) * scale;  // [Hq, Lq, Lk]
    const auto p = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
    outputs.push_back(p.masked_fill(hidden, 0).matmul(values).transpose(0, 1));  // an empty set: softmax gave NaN
  }
  return at::cat(outputs).to(q.scalar_type());
}

}  // namespace sluice
