// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/stream_inject/cases.h"
#include "sluice/kernels/stream_inject/stream_inject.h"

namespace sluice {
namespace {

Tensor composition(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  return residual + y.unsqueeze(1) * (2 * gate.sigmoid()).unsqueeze(2);
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : stream_inject_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn({c.tokens, c.streams, c.width}, options),
                                   at::randn({c.tokens, c.width}, options), at::randn({c.tokens, c.streams}, options)};
      };
      const auto name = "stream_inject/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name, [](const auto& x) { return std::vector{stream_inject(x[0], x[1], x[2])}; }, draw);
      register_benchmarks(
          name + "/ATen composition", [](const auto& x) { return std::vector{composition(x[0], x[1], x[2])}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
