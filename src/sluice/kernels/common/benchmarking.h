// SPDX-License-Identifier: Apache-2.0
// Times an operator beside a peer, forward and backward, and prints the bytes that it must move a second.
#pragma once

#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/kernels/common/testing.h"

namespace sluice {

inline std::int64_t bytes_of(const std::vector<Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
  return bytes;
}

// Registers NAME/forward and NAME/backward for `op` of `inputs`. Bytes: forward reads the inputs and writes the
// outputs; backward reads the inputs and the outputs' gradients and writes the inputs' gradients. Floating inputs get
// gradients, of the sum of the outputs weighted at random.
inline void register_benchmarks(const std::string& name, const Operator& op,
                                const std::function<std::vector<Tensor>()>& draw_inputs) {
  benchmark::RegisterBenchmark((name + "/forward").c_str(), [=](benchmark::State& state) {
    const at::NoGradGuard no_grad;
    const auto inputs = draw_inputs();
    const auto bytes = bytes_of(inputs) + bytes_of(op(inputs));
    for (auto _ : state) benchmark::DoNotOptimize(op(inputs));
    state.SetBytesProcessed(bytes * static_cast<std::int64_t>(state.iterations()));
  })->UseRealTime();
  benchmark::RegisterBenchmark((name + "/backward").c_str(), [=](benchmark::State& state) {
    auto inputs = draw_inputs();
    std::vector<Tensor> leaves, gradients;
    for (auto& input : inputs) {
      if (input.defined() && input.is_floating_point()) leaves.push_back(input.requires_grad_());
    }
    const auto outputs = op(inputs);
    for (const auto& output : outputs) gradients.push_back(at::randn_like(output));
    const auto bytes = bytes_of(inputs) + bytes_of(gradients) + bytes_of(leaves);
    for (auto _ : state) {
      benchmark::DoNotOptimize(torch::autograd::grad(outputs, leaves, gradients, /*retain_graph=*/true));
    }
    state.SetBytesProcessed(bytes * static_cast<std::int64_t>(state.iterations()));
  })->UseRealTime();
}

}  // namespace sluice
