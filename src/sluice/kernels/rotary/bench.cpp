// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/rotary/cases.h"
#include "sluice/kernels/rotary/rotary.h"

namespace sluice {
namespace {

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : rotary_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto table = rotary_table(at::arange(c.tokens, at::TensorOptions().dtype(kLong)), 1e7, c.rotary_dim);
      const auto draw = [c, type] {
        return std::vector<Tensor>{at::randn({c.tokens, c.heads, c.head_dim}, at::TensorOptions().dtype(type))};
      };
      const auto name = "rotary/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name, [table](const auto& x) { return std::vector{rotary(x[0], table.cos, table.sin)}; }, draw);
      register_benchmarks(
          name + "/ATen composition",
          [table](const auto& x) { return std::vector{rotary_definition(x[0], table.cos, table.sin)}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
