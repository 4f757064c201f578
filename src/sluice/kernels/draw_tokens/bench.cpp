// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/benchmarking.h"
#include "sluice/kernels/draw_tokens/cases.h"
#include "sluice/kernels/draw_tokens/draw_tokens.h"

namespace sluice {
namespace {

// The operator, and ATen's softmax with a draw from it.
[[maybe_unused]] const bool registered = [] {
  for (const auto& size : draw_tokens_model_cases()) {
    const auto draw = [size] { return at::randn({size.rows, size.vocabulary}) * 3; };
    const auto time = [&](const std::string& name, const auto& function) {
      benchmark::RegisterBenchmark(("draw_tokens/" + size.name + "/" + name).c_str(), [=](benchmark::State& state) {
        const at::NoGradGuard no_grad;
        const auto logits = draw();
        for (auto _ : state) benchmark::DoNotOptimize(function(logits));
        state.SetBytesProcessed(static_cast<std::int64_t>(logits.nbytes() * state.iterations()));
      })->UseRealTime();
    };
    for (const auto& c : draw_tokens_cases()) {
      if (c.settings.repetition_penalty != 1) continue;
      const auto& s = c.settings;
      const auto settings =
          at::tensor(std::vector<double>{s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, 0.5})
              .expand({size.rows, -1});
      time(c.name, [settings](const Tensor& z) { return draw_tokens(z, z.size(1), settings, std::nullopt); });
    }
    time("ATen's softmax and multinomial", [](const Tensor& z) { return z.softmax(1).multinomial(1); });
  }
  return true;
}();

}  // namespace
}  // namespace sluice
