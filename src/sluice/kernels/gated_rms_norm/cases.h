// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct GatedRmsNormCase {
  std::string name;
  std::int64_t tokens, heads, value_dim;
  double eps = 1e-6;
  double gate_scale = 1;  // of normally distributed gates
};

inline std::vector<GatedRmsNormCase> gated_rms_norm_cases() {
  return {
      {"width 1", 5, 2, 1, 0.5},  // a small eps would leave nothing of the gradient but rounding
      {"width 7", 11, 3, 7},
      {"width 64", 70, 3, 64},
      {"width 257", 40, 2, 257},
      {"one token", 1, 4, 128},
      {"no tokens", 0, 4, 16},
      {"more rows than blocks", 3000, 3, 8},
      {"closed and open gates", 20, 2, 32, 1e-6, 40},
  };
}

// Sizes of the published models' linear attention layers, for the benchmark.
inline std::vector<GatedRmsNormCase> gated_rms_norm_model_cases() {
  return {
      {"Qwen3.5-0.8B, 2k", 2048, 16, 128},
      {"Qwen3-Next-80B, 2k", 2048, 32, 128},
      {"Qwen3.5-0.8B, decode 8", 8, 16, 128},
  };
}

}  // namespace sluice
