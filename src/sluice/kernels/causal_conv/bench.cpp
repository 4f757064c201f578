// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "sluice/kernels/causal_conv/cases.h"
#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/common/benchmarking.h"

namespace sluice {
namespace {

Operator entry(const CausalConvCase& c, decltype(causal_conv)& function) {
  return [cu_seqlens = cu_seqlens_of(c.lengths), &function](const std::vector<Tensor>& x) {
    const auto result = function(x[0], x[1], cu_seqlens, x[2].defined() ? std::optional(x[2]) : std::nullopt, true);
    return std::vector{result.out, result.final_state};
  };
}

// One sequence without a state through ATen's own convolution, the way that transformers' fallback does it.
std::vector<Tensor> grouped_conv1d(const std::vector<Tensor>& x) {
  const auto tokens = x[0].size(0), channels = x[0].size(1), width = x[1].size(2);
  const auto sum = at::conv1d(x[0].t().unsqueeze(0), x[1], {}, 1, width - 1, 1, channels);
  return {at::silu(sum.narrow(2, 0, tokens)).squeeze(0).t().contiguous()};
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& c : causal_conv_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        const auto tokens = std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0});
        const auto sequences = static_cast<std::int64_t>(c.lengths.size());
        return std::vector<Tensor>{
            at::randn({tokens, c.channels}, options), at::randn({c.channels, 1, c.width}, options),
            c.initial_state ? at::randn({sequences, c.channels, c.width - 1}, options) : Tensor()};
      };
      const auto name = "causal_conv/" + c.name + "/" + c10::toString(type);
      register_benchmarks(name, entry(c, causal_conv), draw);
      register_benchmarks(name + "/ATen composition", entry(c, causal_conv_definition), draw);
      if (c.lengths.size() == 1) register_benchmarks(name + "/at::conv1d", grouped_conv1d, draw);
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
