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
};

// True where the largest and the smallest reward are at most 1e-6 apart: the group says nothing. Rounding of the mean
// would otherwise become an advantage. A group of one is uniform.
bool is_uniform(std::span<const double> rewards);

// One advantage a response; exactly 0 in a uniform group.
std::vector<double> group_advantages(std::span<const double> rewards, Advantage kind);

// DAPO's soft penalty (Yu et al. 2025): 0 up to limit - buffer tokens, then falling in a straight line to -1 at the
// limit. buffer is at least 1.
double overlong_penalty(std::int64_t tokens, std::int64_t limit, std::int64_t buffer);

}  // namespace sluice
