// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct GatedDeltaCase {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the packed sequences
  std::int64_t key_heads, value_heads, key_dim, value_dim;
  bool initial_state = false;
  double weakest_decay = 0, strongest_decay = -1;  // g is drawn uniformly between them
};

inline std::vector<GatedDeltaCase> gated_delta_cases() {
  return {
      {"one token", {1}, 1, 1, 8, 8},
      {"two tokens with a state", {2}, 2, 4, 16, 8, true},
      {"around a chunk", {63, 64, 65}, 2, 4, 32, 32, true},
      {"around two chunks", {127, 130, 257}, 2, 4, 16, 24},
      {"three value heads a key head", {70}, 2, 6, 16, 16, true},
      {"many short ones", {1, 2, 3, 1, 16, 17, 15, 1, 1, 5, 33}, 2, 2, 8, 16, true},
      {"an empty one inside", {5, 0, 70, 0}, 1, 2, 8, 8, true},
      {"no decay", {100}, 1, 2, 16, 16, true, 0, 0},
      {"decay to e^-80", {130, 9}, 1, 2, 16, 16, true, 0, -80},
      {"constant e^-80", {80}, 1, 1, 16, 16, true, -80, -80},
  };
}

// Sizes of the published models' layers, for the benchmark.
inline std::vector<GatedDeltaCase> gated_delta_model_cases() {
  return {
      {"Qwen3.5-0.8B, 2k", {2048}, 16, 16, 128, 128},
      {"Qwen3.5-0.8B, 32 x 64", std::vector<std::int64_t>(32, 64), 16, 16, 128, 128},
      {"Qwen3.5-0.8B, decode 8", std::vector<std::int64_t>(8, 1), 16, 16, 128, 128, true},
  };
}

}  // namespace sluice
