// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/gated_rms_norm/cases.h"
#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"

namespace sluice {
namespace {

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : gated_rms_norm_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        const std::vector<std::int64_t> shape{c.tokens, c.heads, c.value_dim};
        return std::vector<Tensor>{at::randn(shape, options), at::randn(shape, options),
                                   at::randn({c.value_dim}, options)};
      };
      const auto name = "gated_rms_norm/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name,
          [](const auto& x) { return std::vector{gated_rms_norm(x[0], x[1], x[2], 1e-6, GateActivation::kSilu)}; },
          draw);
      register_benchmarks(
          name + "/ATen composition",
          [](const auto& x) {
            return std::vector{gated_rms_norm_definition(x[0], x[1], x[2], 1e-6, GateActivation::kSilu)};
          },
          draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
