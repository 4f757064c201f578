// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct BlockTopKCase {
  std::string name;
  std::vector<std::int64_t> queries, keys;  // of the sequences
  std::int64_t heads, dim, block_size, top_k;
  std::int64_t slab = 0;  // rows of block keys that each sequence owns; 0: as many as it has complete blocks
};

inline std::vector<BlockTopKCase> block_top_k_cases() {
  return {
      {"one token", {1}, {1}, 1, 8, 4, 2},
      {"a block is complete with its last token", {3, 4, 5}, {3, 4, 5}, 2, 8, 4, 1},
      {"pack", {1, 40, 3, 97, 8}, {1, 40, 3, 97, 8}, 4, 16, 4, 4},
      {"odd sizes", {33, 50}, {33, 50}, 3, 7, 3, 5},
      {"blocks of one key", {40}, {40}, 2, 8, 1, 8},
      {"never past the budget", {60}, {60}, 2, 16, 4, 16},
      {"empty ones", {0, 5, 0, 40, 0}, {0, 5, 3, 40, 0}, 2, 16, 4, 3},
      {"a prefix in the cache", {20, 1, 30}, {200, 2, 31}, 4, 16, 4, 6, 64},
      {"decode", {1, 1, 1, 1}, {1, 63, 64, 65}, 4, 16, 4, 8, 20},
      {"more queries than keys", {9, 20}, {2, 15}, 2, 8, 2, 3},
  };
}

// The published model's sizes, for the benchmark.
inline std::vector<BlockTopKCase> block_top_k_model_cases() {
  return {
      {"Qwen3.8-Flash-Next, 8k", {8192}, {8192}, 4, 128, 4, 512},
      {"Qwen3.8-Flash-Next, 8 x 1k", std::vector<std::int64_t>(8, 1024), std::vector<std::int64_t>(8, 1024), 4, 128, 4,
       512},
      {"Qwen3.8-Flash-Next, decode 1 at 128k", {1}, {131072}, 4, 128, 4, 512},
  };
}

}  // namespace sluice
