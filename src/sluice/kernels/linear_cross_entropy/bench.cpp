// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/linear_cross_entropy/cases.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {
namespace {

// Backward is timed together with forward: which of them computes the logits is a choice of the operator.
Operator with_gradients(const Operator& op) {
  return [op](const std::vector<Tensor>& x) {
    const at::AutoGradMode grad(true);
    const auto hidden = x[0].detach().requires_grad_(), weight = x[1].detach().requires_grad_();
    return torch::autograd::grad({op({hidden, weight, x[2]})[0].sum()}, {hidden, weight});
  };
}

// The operator and ATen's two, whose logits are in memory at once.
[[maybe_unused]] const bool registered = [] {
  for (const auto& c : linear_cross_entropy_model_cases()) {
    for (const auto type : {kBFloat16, kFloat}) {
      const auto draw = [c, type] {
        const auto options = at::TensorOptions().dtype(type);
        const auto targets = at::randint(c.vocabulary, {c.tokens}, at::TensorOptions().dtype(kLong));
        return std::vector<Tensor>{at::randn({c.tokens, c.hidden}, options),
                                   at::randn({c.vocabulary, c.hidden}, options) / std::sqrt(double(c.hidden)),
                                   targets.masked_fill_(at::rand({c.tokens}) < c.ignored, -100)};
      };
      const auto add = [&](const std::string& name, const Operator& op) {
        for (const bool gradients : {false, true}) {
          benchmark::RegisterBenchmark((name + (gradients ? "/forward and backward" : "/forward")).c_str(),
                                       [=](benchmark::State& state) {
                                         const at::NoGradGuard no_grad;
                                         const auto inputs = draw();
                                         const auto run = gradients ? with_gradients(op) : op;
                                         for (auto _ : state) benchmark::DoNotOptimize(run(inputs));
                                       })
              ->UseRealTime();
        }
      };
      const auto name = "linear_cross_entropy/" + c.name + "/" + c10::toString(type);
      add(name, [](const auto& x) { return std::vector{linear_cross_entropy(x[0], x[1], x[2]).nll}; });
      add(name + "/at::linear and at::cross_entropy_loss", [](const auto& x) {
        return std::vector{at::cross_entropy_loss(at::linear(x[0], x[1]).to(kFloat), x[2], {}, at::Reduction::None)};
      });
    }
  }
  return true;
}();

}  // namespace
}  // namespace sluice
