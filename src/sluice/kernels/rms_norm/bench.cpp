// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/rms_norm/cases.h"
#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {
namespace {

// The operator, the same in whole-tensor ATen operations, and ATen's own plain norm.
[[maybe_unused]] const bool registered = [] {
  for (const auto& c : rms_norm_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        return std::vector<Tensor>{at::randn(c.shape, options), at::randn({c.shape.back()}, options)};
      };
      const auto name = "rms_norm/" + c.name + "/" + c10::toString(type);
      register_benchmarks(
          name, [](const auto& x) { return std::vector{rms_norm(x[0], x[1], 1e-6, true)}; }, draw);
      register_benchmarks(
          name + "/ATen composition",
          [](const auto& x) { return std::vector{rms_norm_definition(x[0], x[1], 1e-6, true)}; }, draw);
      register_benchmarks(
          name + "/at::rms_norm",
          [](const auto& x) { return std::vector{at::rms_norm(x[0], x[1].sizes(), x[1], 1e-6)}; }, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
