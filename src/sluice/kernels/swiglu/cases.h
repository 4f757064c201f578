// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct SwiGluCase {
  std::string name;
  std::int64_t tokens, features;
  double scale = 1;  // of normally distributed gates
};

inline std::vector<SwiGluCase> swiglu_cases() {
  return {{"width 1", 5, 1},     {"width 7", 11, 7},          {"width 257", 40, 257},
          {"one token", 1, 128}, {"several tasks", 700, 300}, {"closed and open gates", 20, 64, 40}};
}

// Feed-forward widths of the published models, for the benchmark.
inline std::vector<SwiGluCase> swiglu_model_cases() {
  return {{"tiny, 4k", 4096, 384}, {"Qwen3.5-0.8B, 2k", 2048, 3584}, {"Qwen3.5-4B, decode 8", 8, 9216}};
}

}  // namespace sluice
