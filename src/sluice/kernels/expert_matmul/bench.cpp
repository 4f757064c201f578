// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/expert_matmul/cases.h"
#include "sluice/kernels/expert_matmul/expert_matmul.h"

namespace sluice {
namespace {

// The operator gathering its lines, beside a loop over the experts in ATen.
[[maybe_unused]] const bool registered = [] {
  for (const auto& c : expert_matmul_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn({c.tokens, c.in}, options),
                                   at::randn({c.experts, c.out, c.in}, options) / std::sqrt(double(c.in))};
      };
      const auto lines = draw_lines(c);
      const auto count = c.tokens * c.visits;
      const auto name = "expert_matmul/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name,
          [=](const auto& x) {
            return std::vector{expert_matmul(x[0], x[1], lines.offsets, lines.tokens, std::nullopt, count)};
          },
          draw);
      register_benchmarks(
          name + "/loop of at::mm",
          [=](const auto& x) {
            std::vector<Tensor> parts;
            const auto* bounds = lines.offsets.template const_data_ptr<std::int32_t>();
            for (std::int64_t e = 0; e < c.experts; ++e) {
              if (bounds[e] == bounds[e + 1]) continue;
              const auto own = lines.tokens.narrow(0, bounds[e], bounds[e + 1] - bounds[e]);
              parts.push_back(at::mm(x[0].index_select(0, own), x[1][e].t()));
            }
            return std::vector{at::cat(parts)};
          },
          draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
