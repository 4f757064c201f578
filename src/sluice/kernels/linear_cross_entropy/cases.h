// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct LinearCrossEntropyCase {
  std::string name;
  std::int64_t tokens, hidden, vocabulary;
  double ignored = 0;      // share of the targets that are -100
  double logit_scale = 1;  // about the standard deviation of the logits
};

inline std::vector<LinearCrossEntropyCase> linear_cross_entropy_cases() {
  return {
      {"one token", 1, 8, 16},
      {"one id", 5, 8, 1},
      {"odd sizes", 37, 33, 1003},
      {"half ignored", 300, 16, 500, 0.5},
      {"all but few ignored", 200, 16, 65, 0.97},
      {"several token tiles", 4100, 8, 130},
      {"several vocabulary tiles", 300, 8, 30000, 0.1},
      {"sharp", 64, 16, 1000, 0, 30},
  };
}

// Sizes of the published models' output layers, cut to what a CPU does in seconds.
inline std::vector<LinearCrossEntropyCase> linear_cross_entropy_model_cases() {
  return {
      {"2k x 640 x 32k", 2048, 640, 32000},
      {"512 x 1024 x 248320", 512, 1024, 248320},
      {"2k x 256 x 2048", 2048, 256, 2048},
      {"2k x 640 x 32k, 80% ignored", 2048, 640, 32000, 0.8},
  };
}

}  // namespace sluice
