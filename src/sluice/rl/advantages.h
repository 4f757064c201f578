// SPDX-License-Identifier: Apache-2.0
// From the rewards of a group, the responses to one prompt, to their advantages; and rewards that follow from a
// response's length.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice {

enum class Advantage {
  kGroup,        // (r - mean) / (std + 1e-6), std with n - 1: GRPO (Shao et al. 2024)
  kGroupMean,    // r - mean: Dr. GRPO (Liu et al. 2025)
  kLeaveOneOut,  // r - mean of the others: RLOO (Ahmadian et al. 2024)
  kGae,          // of each token, from a value head: generalized_advantages()
};

// True where the largest and the smallest reward are at most 1e-6 apart: the group says nothing. Rounding of the mean
// would otherwise become an advantage. A group of one is uniform.
bool is_uniform(std::span<const double> rewards);

// One advantage a response; exactly 0 in a uniform group. Not for kGae, which knows no groups.
std::vector<double> group_advantages(std::span<const double> rewards, Advantage kind);

struct GaeSettings {
  double gamma = 1, lambda = 1;
};

struct TokenAdvantages {
  std::vector<double> advantages, returns;
};

// Generalized advantage estimation (Schulman et al. 2016) over the n tokens of one response:
//   delta_t = r_t + gamma V_t+1 - V_t    A_t = delta_t + gamma lambda A_t+1    returns_t = A_t + V_t
// V_t is the value before token t is drawn. The last token ends the episode, also where the answer was cut off: V_n and
// A_n are 0.
TokenAdvantages generalized_advantages(std::span<const double> rewards, std::span<const double> values,
                                       const GaeSettings& settings);

// Shifts and scales the numbers of all parts together to mean 0 and variance 1: (x - mean) / sqrt(variance + 1e-8),
// variance with n - 1. A single number becomes 0.
void whiten(std::span<std::vector<double>> parts);

// How much of the returns' variance the values explain: 1 - var(returns - values) / var(returns); 0 where the returns
// are all the same.
double explained_variance(std::span<const double> values, std::span<const double> returns);

// DAPO's soft penalty (Yu et al. 2025): 0 up to limit - buffer tokens, then falling in a straight line to -1 at the
// limit. buffer is at least 1.
double overlong_penalty(std::int64_t tokens, std::int64_t limit, std::int64_t buffer);

}  // namespace sluice
