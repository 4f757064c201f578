// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {

Tensor attention_definition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                            const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k, double scale) {
  const auto type = wide_type(q.scalar_type());
  const auto group = q.size(1) / k.size(1);
  const auto by_head = [&](const Tensor& x) { return x.to(type).transpose(0, 1); };  // [H, T, d]
  const auto queries = by_head(q), keys = by_head(k.repeat_interleave(group, 1)),
             values = by_head(v.repeat_interleave(group, 1));
  const auto q_bounds = sequence_bounds(cu_seqlens_q), k_bounds = sequence_bounds(cu_seqlens_k);
  std::vector<Tensor> outputs{at::zeros({0, q.size(1), v.size(2)}, queries.options())};
  for (std::size_t n = 0; n + 1 < q_bounds.size(); ++n) {
    const auto q_count = q_bounds[n + 1] - q_bounds[n];
    const auto k_count =
        seqused_k ? (*seqused_k)[static_cast<std::int64_t>(n)].item<std::int64_t>() : k_bounds[n + 1] - k_bounds[n];
    const auto own_keys = keys.narrow(1, k_bounds[n], k_count), own_values = values.narrow(1, k_bounds[n], k_count);
    const auto scores =
        queries.narrow(1, q_bounds[n], q_count).matmul(own_keys.transpose(1, 2)) * scale;  // [H, Lq, Lk]
    const auto visible = at::ones({q_count, k_count}, scores.options().dtype(at::kBool)).tril(k_count - q_count);
    const auto hidden = visible.logical_not();
    const auto p = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
    outputs.push_back(p.masked_fill(hidden, 0).matmul(own_values).transpose(0, 1));  // no visible key: softmax gave NaN
  }
  return at::cat(outputs).to(q.scalar_type());
}

}  // namespace sluice
