// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/advantages.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sluice {
namespace {

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double squares_around(double middle, std::span<const double> values) {
  double sum = 0;
  for (const auto value : values) sum += (value - middle) * (value - middle);
  return sum;
}

}  // namespace

bool is_uniform(std::span<const double> rewards) {
  const auto [low, high] = std::ranges::minmax_element(rewards);
  return rewards.size() < 2 || *high - *low <= 1e-6;
}

std::vector<double> group_advantages(std::span<const double> rewards, Advantage kind) {
  std::vector<double> advantages(rewards.size(), 0.0);
  if (is_uniform(rewards)) return advantages;
  const auto count = static_cast<double>(rewards.size());
  const auto mean = mean_of(rewards);
  double scale = 1;
  if (kind == Advantage::kGroup) scale = 1 / (std::sqrt(squares_around(mean, rewards) / (count - 1)) + 1e-6);
  if (kind == Advantage::kLeaveOneOut) scale = count / (count - 1);  // r - (sum - r) / (n - 1)
  for (std::size_t i = 0; i < rewards.size(); ++i) advantages[i] = (rewards[i] - mean) * scale;
  return advantages;
}

TokenAdvantages generalized_advantages(std::span<const double> rewards, std::span<const double> values,
                                       const GaeSettings& settings) {
  TokenAdvantages found{std::vector<double>(values.size()), std::vector<double>(values.size())};
  double next_value = 0, next_advantage = 0;
  for (auto t = values.size(); t-- > 0;) {
    const auto delta = rewards[t] + settings.gamma * next_value - values[t];
    next_advantage = delta + settings.gamma * settings.lambda * next_advantage;
    next_value = values[t];
    found.advantages[t] = next_advantage;
    found.returns[t] = next_advantage + values[t];
  }
  return found;
}

void whiten(std::span<std::vector<double>> parts) {
  std::vector<double> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  if (all.empty()) return;
  const auto mean = mean_of(all);
  const auto others = std::max(static_cast<double>(all.size()) - 1, 1.0);
  const auto scale = 1 / std::sqrt(squares_around(mean, all) / others + 1e-8);
  for (auto& part : parts) {
    for (auto& value : part) value = (value - mean) * scale;
  }
}

double explained_variance(std::span<const double> values, std::span<const double> returns) {
  if (returns.empty()) return 0;
  std::vector<double> errors;
  for (std::size_t i = 0; i < returns.size(); ++i) errors.push_back(returns[i] - values[i]);
  const auto whole = squares_around(mean_of(returns), returns);
  return whole > 0 ? 1 - squares_around(mean_of(errors), errors) / whole : 0;
}

double overlong_penalty(std::int64_t tokens, std::int64_t limit, std::int64_t buffer) {
  const auto over = static_cast<double>(tokens - (limit - buffer));
  return -std::clamp(over / static_cast<double>(buffer), 0.0, 1.0);
}

}  // namespace sluice
