// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/attention/cases.h"
#include "sluice/kernels/common/benchmarking.h"

namespace sluice {
namespace {

// ATen's attention, sequence by sequence; its causal mask is aligned at the first query, so it serves equal lengths and
// single queries.
Tensor sequence_by_sequence(const AttentionCase& c, const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  std::vector<Tensor> outputs;
  std::int64_t q_begin = 0, k_begin = 0;
  for (std::size_t n = 0; n < c.queries.size(); ++n) {
    const auto rows = [](const Tensor& x, std::int64_t begin, std::int64_t count) {
      return x.narrow(0, begin, count).transpose(0, 1).unsqueeze(0);  // [1, H, T, d]
    };
    const auto out = at::scaled_dot_product_attention(rows(q, q_begin, c.queries[n]), rows(k, k_begin, c.keys[n]),
                                                      rows(v, k_begin, c.keys[n]), {}, 0,
                                                      /*is_causal=*/c.queries[n] > 1, scale, /*enable_gqa=*/true);
    outputs.push_back(out.squeeze(0).transpose(0, 1));
    q_begin += c.queries[n];
    k_begin += c.capacity > 0 ? c.capacity : c.keys[n];
  }
  return at::cat(outputs);
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : attention_model_cases()) {
    const auto slabs = c.capacity > 0 ? std::vector<std::int64_t>(c.keys.size(), c.capacity) : c.keys;
    const auto sum = [](const auto& x) { return std::accumulate(x.begin(), x.end(), std::int64_t{0}); };
    const auto scale = 1 / std::sqrt(static_cast<double>(c.key_dim));
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [=] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn({sum(c.queries), c.heads, c.key_dim}, options),
                                   at::randn({sum(slabs), c.kv_heads, c.key_dim}, options),
                                   at::randn({sum(slabs), c.kv_heads, c.value_dim}, options)};
      };
      const auto name = "attention/" + c.name + "/" + c10::toString(type);
      const auto q_bounds = cu_seqlens_of(c.queries), k_bounds = cu_seqlens_of(slabs);
      const auto used = at::tensor(c.keys, at::TensorOptions().dtype(kInt));
      const auto longest_q = std::ranges::max(c.queries), longest_k = std::ranges::max(c.keys);
      register_benchmarks(
          name,
          [=](const auto& x) {
            return std::vector{attention(x[0], x[1], x[2], q_bounds, k_bounds, used, longest_q, longest_k, scale)};
          },
          draw);
      register_benchmarks(
          name + "/at::scaled_dot_product_attention",
          [=](const auto& x) { return std::vector{sequence_by_sequence(c, x[0], x[1], x[2], scale)}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
