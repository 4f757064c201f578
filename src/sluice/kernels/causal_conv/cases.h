// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct CausalConvCase {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the packed sequences
  std::int64_t channels, width;
  bool initial_state = false;
};

inline std::vector<CausalConvCase> causal_conv_cases() {
  return {
      {"one token with a state", {1}, 64, 4, true},
      {"two tokens with a state", {2}, 64, 4, true},
      {"three tokens with a state", {3}, 64, 4, true},
      {"one token", {1}, 64, 4},
      {"pack at tile edges", {63, 64, 65, 127, 128, 129, 256, 257}, 64, 4},
      {"the same with states", {63, 64, 65, 127, 128, 129, 256, 257}, 64, 4, true},
      {"many short ones", {1, 2, 3, 1, 1, 4, 5, 1, 2, 130, 1, 1}, 7, 4, true},
      {"empty ones", {0, 5, 0, 0, 140, 0}, 16, 4, true},
      {"no tokens", {0, 0}, 16, 4, true},
      {"one channel", {9, 140}, 1, 4, true},
      {"more channels than a chunk", {9, 140}, 257, 4, true},
      {"width 1", {9, 140}, 33, 1, true},
      {"width 2", {1, 140}, 33, 2, true},
      {"width 7", {1, 5, 6, 140, 7}, 33, 7, true},
  };
}

// Sizes of the published models' linear attention layers (q, k and v together), for the benchmark.
inline std::vector<CausalConvCase> causal_conv_model_cases() {
  return {
      {"Qwen3.5-0.8B, 2k", {2048}, 6144, 4},
      {"Qwen3.5-0.8B, 32 x 64", std::vector<std::int64_t>(32, 64), 6144, 4},
      {"Qwen3.5-0.8B, decode 8", std::vector<std::int64_t>(8, 1), 6144, 4, true},
  };
}

}  // namespace sluice
