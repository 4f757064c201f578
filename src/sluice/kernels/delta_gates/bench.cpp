// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/delta_gates/cases.h"
#include "sluice/kernels/delta_gates/delta_gates.h"

namespace sluice {
namespace {

Operator entry(decltype(delta_gates)& function) {
  return [&function](const std::vector<Tensor>& x) {
    const auto gates = function(x[0], x[1], x[2], x[3]);
    return std::vector{gates.g, gates.beta};
  };
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : delta_gates_model_cases()) {
    const auto draw = [c] {
      const auto options = at::TensorOptions().dtype(kBFloat16);
      return std::vector<Tensor>{at::randn({c.tokens, c.heads}, options), at::randn({c.tokens, c.heads}, options),
                                 at::randn({c.heads}), at::randn({c.heads})};
    };
    register_benchmarks("delta_gates/" + c.name, entry(delta_gates), draw);
    register_benchmarks("delta_gates/" + c.name + "/ATen composition", entry(delta_gates_definition), draw);
  }
  return true;
}();

}  // namespace
}  // namespace sluice
