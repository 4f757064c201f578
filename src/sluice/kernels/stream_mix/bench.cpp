// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/stream_mix/cases.h"
#include "sluice/kernels/stream_mix/stream_mix.h"

namespace sluice {
namespace {

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : stream_mix_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn({c.tokens, c.streams, c.width}, options),
                                   at::randn({c.tokens, c.streams, c.width}, options)};
      };
      const auto name = "stream_mix/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name, [](const auto& x) { return std::vector{stream_mix(x[0], x[1])}; }, draw);
      register_benchmarks(
          name + "/ATen composition", [](const auto& x) { return std::vector{(x[1].sigmoid() * x[0]).mean(1)}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
