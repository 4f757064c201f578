// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct AttentionCase {
  std::string name;
  std::vector<std::int64_t> queries, keys;  // of the packed sequences
  std::int64_t heads, kv_heads, key_dim, value_dim;
  std::int64_t capacity = 0;  // rows of each sequence's slab in a cache; 0: keys are packed without gaps
};

inline std::vector<AttentionCase> attention_cases() {
  return {
      {"one token", {1}, {1}, 1, 1, 8, 8},
      {"odd sizes", {3, 17}, {3, 17}, 3, 1, 7, 5},
      {"around a tile", {255, 256, 257}, {255, 256, 257}, 2, 2, 16, 16},
      {"several tiles", {600}, {600}, 4, 2, 32, 24},
      {"twelve heads a kv head", {70}, {70}, 24, 2, 16, 16},
      {"short ones", {1, 2, 3, 8, 9, 33, 1}, {1, 2, 3, 8, 9, 33, 1}, 4, 2, 16, 16},
      {"empty ones", {0, 5, 0, 40, 0}, {0, 5, 3, 40, 0}, 4, 2, 16, 16},
      {"more queries than keys", {5, 60, 4}, {2, 30, 0}, 2, 1, 16, 16},
      {"a prefix in the cache", {20, 1, 130}, {300, 2, 131}, 4, 2, 16, 16, 320},
      {"decode", {1, 1, 1}, {1, 64, 65}, 4, 2, 16, 16, 80},
      {"decode over three splits", {1, 2}, {2500, 1025}, 4, 1, 16, 12, 2500},
      {"an empty cache", {1, 30, 2}, {0, 0, 9}, 2, 1, 16, 16, 16},
  };
}

// Sizes of the published models' layers, for the benchmark.
inline std::vector<AttentionCase> attention_model_cases() {
  const std::vector<std::int64_t> pack(32, 64), one_each(8, 1);
  return {
      {"Qwen3.5-0.8B, 2k", {2048}, {2048}, 8, 2, 256, 256},
      {"Qwen3.5-0.8B, 32 x 64", pack, pack, 8, 2, 256, 256},
      {"Qwen3.5-0.8B, decode 8 at 1k", one_each, std::vector<std::int64_t>(8, 1024), 8, 2, 256, 256, 2048},
      {"Qwen3.5-0.8B, decode 1 at 8k", {1}, {8192}, 8, 2, 256, 256, 8192},
      {"Qwen3.5-0.8B, decode 1 at 16", {1}, {16}, 8, 2, 256, 256, 32},
  };
}

}  // namespace sluice
