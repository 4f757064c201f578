// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/cases.h"
#include "sluice/kernels/common/benchmarking.h"

namespace sluice {
namespace {

// Blocks spread evenly over what each query of one sequence sees.
Tensor spread_blocks(const BlockSparseAttentionCase& c) {
  const auto first = c.keys[0] - c.queries[0];
  auto blocks = at::full({c.queries[0], c.top_k}, -1, at::TensorOptions().dtype(kInt));
  for (std::int64_t i = 0; i < c.queries[0]; ++i) {
    const auto complete = (first + i + 1) / c.block_size, count = std::min(c.top_k, complete);
    blocks[i]
        .narrow(0, 0, count)
        .copy_(at::floor_divide(at::arange(count) * complete, std::max<std::int64_t>(count, 1)));
  }
  return blocks;
}

// ATen's dense attention of one sequence.
Tensor dense(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const auto heads_first = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const auto out = at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {}, 0,
                                                    /*is_causal=*/q.size(0) > 1, scale, /*enable_gqa=*/true);
  return out.squeeze(0).transpose(0, 1);
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : block_sparse_attention_model_cases()) {
    const auto scale = 1 / std::sqrt(static_cast<double>(c.key_dim));
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [=] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn({c.queries[0], c.heads, c.key_dim}, options),
                                   at::randn({c.keys[0], c.kv_heads, c.key_dim}, options),
                                   at::randn({c.keys[0], c.kv_heads, c.value_dim}, options)};
      };
      const auto name = "block_sparse_attention/" + c.name + "/" + c10::toString(type);
      const auto q_bounds = cu_seqlens_of(c.queries), k_bounds = cu_seqlens_of(c.keys);
      register_benchmarks(
          name,
          [=, blocks = Tensor()](const auto& x) mutable {
            if (!blocks.defined()) blocks = spread_blocks(c);
            return std::vector{block_sparse_attention(x[0], x[1], x[2], blocks, c.block_size, q_bounds, k_bounds,
                                                      std::nullopt, scale)};
          },
          draw);
      register_benchmarks(
          name + "/at::scaled_dot_product_attention, dense",
          [=](const auto& x) { return std::vector{dense(x[0], x[1], x[2], scale)}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
