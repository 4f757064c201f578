// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct StreamInjectCase {
  std::string name;
  std::int64_t tokens, streams, width;
  double scale = 1;  // of normally distributed gates
};

inline std::vector<StreamInjectCase> stream_inject_cases() {
  return {{"width 1", 5, 3, 1},           {"width 7", 11, 4, 7},
          {"width 257", 40, 2, 257},      {"one stream", 9, 1, 128},
          {"several tasks", 300, 4, 300}, {"one token", 1, 4, 64},
          {"nine streams", 3, 9, 8},      {"closed and open", 20, 4, 64, 40}};
}

// Sizes of the published model, for the benchmark.
inline std::vector<StreamInjectCase> stream_inject_model_cases() {
  return {{"Qwen3.8-Flash-Next, 512", 512, 4, 2560}, {"Qwen3.8-Flash-Next, decode 8", 8, 4, 2560}};
}

}  // namespace sluice
