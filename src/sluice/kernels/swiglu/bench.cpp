// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/swiglu/cases.h"
#include "sluice/kernels/swiglu/swiglu.h"

namespace sluice {
namespace {

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : swiglu_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn({c.tokens, c.features}, options),
                                   at::randn({c.tokens, c.features}, options)};
      };
      const auto name = "swiglu/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name, [](const auto& x) { return std::vector{swiglu(x[0], x[1])}; }, draw);
      register_benchmarks(
          name + "/ATen composition", [](const auto& x) { return std::vector{at::silu(x[0]) * x[1]}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
