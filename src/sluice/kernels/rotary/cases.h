// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct RotaryCase {
  std::string name;
  std::int64_t tokens, heads, head_dim, rotary_dim;
};

inline std::vector<RotaryCase> rotary_cases() {
  return {
      {"one pair", 5, 1, 2, 2},          {"odd width", 9, 3, 7, 6}, {"a quarter, as Qwen", 33, 2, 256, 64},
      {"the whole head", 20, 4, 64, 64}, {"nothing", 4, 2, 8, 0},   {"width 257", 10, 1, 257, 256},
      {"no tokens", 0, 2, 16, 8},
  };
}

// Queries of the published models, for the benchmark.
inline std::vector<RotaryCase> rotary_model_cases() {
  return {
      {"Qwen3.5-0.8B, 2k", 2048, 8, 256, 64},
      {"whole heads of 128, 2k", 2048, 16, 128, 128},
      {"Qwen3.5-0.8B, decode 8", 8, 8, 256, 64},
  };
}

}  // namespace sluice
