// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct DeltaGatesCase {
  std::string name;
  std::int64_t tokens, heads;
  double scale = 1;  // of normally distributed projections
};

inline std::vector<DeltaGatesCase> delta_gates_cases() {
  return {
      {"one token", 1, 4},
      {"one head", 70, 1},
      {"no tokens", 0, 3},
      {"48 heads", 300, 48},
      {"more rows than a block", 1000, 5},
      {"saturated", 50, 8, 40},
  };
}

// Sizes of the published models' linear attention layers, for the benchmark.
inline std::vector<DeltaGatesCase> delta_gates_model_cases() {
  return {{"Qwen3.5-0.8B, 2k", 2048, 16}, {"Qwen3-Next-80B, 2k", 2048, 32}};
}

}  // namespace sluice
