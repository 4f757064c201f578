// SPDX-License-Identifier: Apache-2.0
// Named settings and sizes that the test checks and the benchmark times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/kernels/draw_tokens/settings.h"

namespace sluice {

struct DrawTokensCase {
  std::string name;
  DrawSettings settings;  // but for the random number
};

inline std::vector<DrawTokensCase> draw_tokens_cases() {
  return {
      {"greedy", {.temperature = 0}},
      {"plain", {}},
      {"hot", {.temperature = 2.5}},
      {"cold", {.temperature = 0.2}},
      {"as good as greedy", {.temperature = 1e-30}},
      {"top-k 1", {.top_k = 1}},
      {"top-k 20", {.top_k = 20}},
      {"top-k beyond the vocabulary", {.top_k = 1e9}},
      {"top-p", {.top_p = 0.9}},
      {"top-p 0 keeps the largest", {.top_p = 0}},
      {"tiny top-p", {.top_p = 1e-12}},
      {"nearly all", {.top_p = 0.9999}},
      {"min-p", {.min_p = 0.1}},
      {"min-p 1 keeps what ties with the largest", {.min_p = 1}},
      {"penalty", {.repetition_penalty = 1.3}},
      {"reward", {.repetition_penalty = 0.7}},
      {"all", {.temperature = 0.7, .top_k = 50, .top_p = 0.8, .min_p = 0.02, .repetition_penalty = 1.1}},
  };
}

inline std::vector<std::int64_t> draw_tokens_sizes() { return {1, 5, 64, 1023, 5000}; }

struct DrawTokensModelCase {
  std::string name;
  std::int64_t rows, vocabulary;
};

inline std::vector<DrawTokensModelCase> draw_tokens_model_cases() {
  return {{"Qwen3.5, one row", 1, 248320}, {"Qwen3.5, 16 rows", 16, 248320}};
}

}  // namespace sluice
