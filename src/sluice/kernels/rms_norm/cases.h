// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct RmsNormCase {
  std::string name;
  std::vector<std::int64_t> shape;  // of x
  double eps = 1e-6;
};

inline std::vector<RmsNormCase> rms_norm_cases() {
  return {
      {"width 1", {5, 1}, 0.5},  // a small eps would leave nothing of the gradient but rounding
      {"width 7", {33, 7}},         {"width 64", {70, 3, 64}}, {"width 257", {100, 257}},
      {"one row", {1024}},          {"no rows", {0, 16}},      {"more rows than blocks", {9000, 8}},
      {"a large eps", {17, 48}, 3},
  };
}

// Sizes of the published models, for the benchmark: hidden states, and queries by head.
inline std::vector<RmsNormCase> rms_norm_model_cases() {
  return {
      {"Qwen3.5-0.8B, 2k", {2048, 1024}},
      {"Qwen3.5-27B, 2k", {2048, 5120}},
      {"heads of 256, 2k", {2048, 8, 256}},
      {"Qwen3.5-0.8B, decode 8", {8, 1024}},
  };
}

}  // namespace sluice
