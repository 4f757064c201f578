// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/advantages.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sluice {

bool is_uniform(std::span<const double> rewards) {
  const auto [low, high] = std::ranges::minmax_element(rewards);
  return rewards.size() < 2 || *high - *low <= 1e-6;
}

std::vector<double> group_advantages(std::span<const double> rewards, Advantage kind) {
  std::vector<double> advantages(rewards.size(), 0.0);
  if (is_uniform(rewards)) return advantages;
  const auto count = static_cast<double>(rewards.size());
  const auto mean = std::accumulate(rewards.begin(), rewards.end(), 0.0) / count;
  double squares = 0;
  for (const auto reward : rewards) squares += (reward - mean) * (reward - mean);
  double scale = 1;
  if (kind == Advantage::kGroup) scale = 1 / (std::sqrt(squares / (count - 1)) + 1e-6);
  if (kind == Advantage::kLeaveOneOut) scale = count / (count - 1);  // r - (sum - r) / (n - 1)
  for (std::size_t i = 0; i < rewards.size(); ++i) advantages[i] = (rewards[i] - mean) * scale;
  return advantages;
}

double overlong_penalty(std::int64_t tokens, std::int64_t limit, std::int64_t buffer) {
  const auto over = static_cast<double>(tokens - (limit - buffer));
  return -std::clamp(over / static_cast<double>(buffer), 0.0, 1.0);
}

}  // namespace sluice
