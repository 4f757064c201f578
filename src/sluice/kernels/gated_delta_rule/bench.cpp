// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numeric>

#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/gated_delta_rule/cases.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"

namespace sluice {
namespace {

std::vector<Tensor> draw_inputs(const GatedDeltaCase& c, at::ScalarType type) {
  const auto tokens = std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0});
  const auto options = at::TensorOptions().dtype(type);
  return {at::randn({tokens, c.key_heads, c.key_dim}, options), at::randn({tokens, c.key_heads, c.key_dim}, options),
          at::randn({tokens, c.value_heads, c.value_dim}, options), -at::rand({tokens, c.value_heads}),
          at::rand({tokens, c.value_heads})};
}

// The operator, and the recurrence token by token in ATen where that ends in reasonable time.
[[maybe_unused]] const bool registered = [] {
  for (const auto& c : gated_delta_model_cases()) {
    const auto cu_seqlens = cu_seqlens_of(c.lengths);
    const auto scale = 1 / std::sqrt(static_cast<double>(c.key_dim));
    const auto run = [cu_seqlens, scale](decltype(gated_delta_rule)& function) {
      return [=, &function](const std::vector<Tensor>& x) {
        return std::vector{function(x[0], x[1], x[2], x[3], x[4], cu_seqlens, std::nullopt, scale, true,
                                    /*output_final_state=*/false)
                               .out};
      };
    };
    for (const auto type : {kBFloat16, kFloat}) {
      const auto name = "gated_delta_rule/" + c.name + "/" + c10::toString(type);
      register_benchmarks(name, run(gated_delta_rule), [c, type] { return draw_inputs(c, type); });
      if (c.lengths.front() <= 64) {
        register_benchmarks(name + "/definition", run(gated_delta_rule_definition),
                            [c, type] { return draw_inputs(c, type); });
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
