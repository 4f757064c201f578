// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "sluice/kernels/block_top_k/block_top_k.h"
#include "sluice/kernels/block_top_k/cases.h"
#include "sluice/kernels/common/testing.h"

namespace sluice {
namespace {

// The operator, and for one sequence ATen's way: all scores at once, a mask, topk.
Tensor all_at_once(const Tensor& q, const Tensor& keys, std::int64_t key_count, std::int64_t block_size,
                   std::int64_t top_k) {
  const auto scores = at::einsum("thd,bd->thb", {q.to(kFloat), keys.to(kFloat)}).relu_().sum(1);
  const auto position = at::arange(key_count - q.size(0) + 1, key_count + 1).unsqueeze(1);
  const auto hidden = at::arange(keys.size(0)) >= at::floor_divide(position, block_size);
  return std::get<1>(scores.masked_fill(hidden, -1).topk(std::min(top_k, keys.size(0)), 1));
}

using Function = std::function<Tensor(const Tensor& q, const Tensor& block_keys)>;

void time(const std::string& name, at::IntArrayRef q_shape, at::IntArrayRef key_shape, at::ScalarType type,
          const Function& function) {
  const auto draw = [type](const std::vector<std::int64_t>& shape) {
    return at::randn(shape, at::TensorOptions().dtype(type));
  };
  benchmark::RegisterBenchmark(name.c_str(), [=, q_size = q_shape.vec(),
                                              key_size = key_shape.vec()](benchmark::State& state) {
    const at::NoGradGuard no_grad;
    const auto q = draw(q_size), keys = draw(key_size);
    for (auto _ : state) benchmark::DoNotOptimize(function(q, keys));
  })->UseRealTime();
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : block_top_k_model_cases()) {
    std::vector<std::int64_t> blocks;
    for (const auto keys : c.keys) blocks.push_back(keys / c.block_size);
    const auto sum = [](const auto& x) { return std::accumulate(x.begin(), x.end(), std::int64_t{0}); };
    const auto used = at::tensor(c.keys, at::TensorOptions().dtype(kInt));
    for (const auto type : {kBFloat16, kFloat}) {
      const std::vector<std::int64_t> q_shape{sum(c.queries), c.heads, c.dim}, key_shape{sum(blocks), c.dim};
      const auto name = "block_top_k/" + c.name + "/" + c10::toString(type);
      time(name, q_shape, key_shape, type, [=](const Tensor& q, const Tensor& keys) {
        return block_top_k(q, keys, cu_seqlens_of(c.queries), cu_seqlens_of(blocks), used, c.block_size, c.top_k,
                           1 / std::sqrt(static_cast<double>(c.dim)));
      });
      if (c.queries.size() > 1) continue;
      time(name + "/ATen, all scores at once", q_shape, key_shape, type,
           [=](const Tensor& q, const Tensor& keys) { return all_at_once(q, keys, c.keys[0], c.block_size, c.top_k); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
