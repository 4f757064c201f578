// SPDX-License-Identifier: Apache-2.0
// Named shapes that the test checks and the benchmark times, and lines drawn for them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

struct ExpertMatmulCase {
  std::string name;
  std::int64_t experts, in, out, tokens, visits;  // each token visits so many experts
  std::int64_t used = experts;                    // the first so many experts alone
};

inline std::vector<ExpertMatmulCase> expert_matmul_cases() {
  return {
      {"one of each", 1, 1, 1, 1, 1},
      {"odd sizes", 5, 33, 47, 61, 2},
      {"most experts unused", 64, 32, 24, 7, 2, 9},
      {"one expert has all", 6, 16, 40, 130, 1, 1},
      {"every expert for every token", 4, 300, 8, 19, 4},
      {"no tokens", 3, 8, 8, 0, 2},
      {"blocks of the matrix unit", 3, 128, 192, 200, 2},
  };
}

// The two products of published models' experts, for a CPU's worth of tokens, and one token of decoding.
inline std::vector<ExpertMatmulCase> expert_matmul_model_cases() {
  return {
      {"Qwen3-Next gate and up, 512", 512, 2048, 1024, 512, 10},
      {"Qwen3-Next down, 512", 512, 512, 2048, 512, 10},
      {"Qwen3.5-35B gate and up, 512", 256, 2048, 1024, 512, 8},
      {"Qwen3-Next gate and up, decode 1", 512, 2048, 1024, 1, 10},
  };
}

struct ExpertMatmulLines {
  Tensor offsets;  // [E + 1] int32
  Tensor tokens;   // [tokens * visits] int64: the token of each line
};

// Every token's visits, to different experts at random, sorted by expert.
inline ExpertMatmulLines draw_lines(const ExpertMatmulCase& c) {
  const auto chosen = at::rand({c.tokens, std::max(c.used, c.visits)}).argsort(1, false).narrow(1, 0, c.visits);
  const auto order = chosen.reshape(-1).argsort(/*stable=*/true, 0, /*descending=*/false);
  const auto ends = at::bincount(chosen.reshape(-1), std::nullopt, c.experts).cumsum(0);
  return {at::constant_pad_nd(ends, {1, 0}).to(kInt), at::floor_divide(order, c.visits)};
}

}  // namespace sluice
