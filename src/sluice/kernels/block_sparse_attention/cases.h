// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct BlockSparseAttentionCase {
  std::string name;
  std::vector<std::int64_t> queries, keys;  // of the packed sequences
  std::int64_t heads, kv_heads, key_dim, value_dim, block_size, top_k;
  std::int64_t capacity = 0;  // rows of each sequence's slab in a cache; 0: keys are packed without gaps
};

inline std::vector<BlockSparseAttentionCase> block_sparse_attention_cases() {
  return {
      {"one token", {1}, {1}, 1, 1, 8, 8, 4, 2},
      {"odd sizes", {3, 37}, {3, 37}, 3, 1, 7, 5, 3, 4},
      {"pack", {1, 40, 3, 97, 8}, {1, 40, 3, 97, 8}, 4, 2, 16, 16, 4, 4},
      {"several stripes", {600}, {600}, 4, 2, 16, 24, 4, 8},
      {"blocks across stripes", {300, 530}, {300, 530}, 2, 2, 16, 16, 7, 5},
      {"twelve heads a kv head", {70}, {70}, 24, 2, 40, 40, 4, 3},
      {"every block", {60}, {60}, 4, 2, 16, 16, 4, 15},
      {"blocks of one key", {50}, {50}, 2, 1, 16, 16, 1, 9},
      {"empty ones", {0, 5, 0, 40, 0}, {0, 5, 3, 40, 0}, 4, 2, 16, 16, 4, 3},
      {"more queries than keys", {5, 60, 4}, {2, 30, 0}, 2, 1, 16, 16, 4, 2},
      {"a prefix in the cache", {20, 1, 130}, {300, 2, 131}, 4, 2, 16, 16, 4, 6, 320},
      {"decode", {1, 1, 1, 1}, {1, 63, 64, 65}, 4, 2, 16, 16, 4, 5, 80},
  };
}

// The published model's sizes, for the benchmark.
inline std::vector<BlockSparseAttentionCase> block_sparse_attention_model_cases() {
  return {
      {"Qwen3.8-Flash-Next, 4k", {4096}, {4096}, 24, 2, 256, 256, 4, 512},
      {"Qwen3.8-Flash-Next, 8k", {8192}, {8192}, 24, 2, 256, 256, 4, 512},
      {"Qwen3.8-Flash-Next, decode 1 at 32k", {1}, {32768}, 24, 2, 256, 256, 4, 512, 32768},
  };
}

}  // namespace sluice
