// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/advantages.h"

#include <gtest/gtest.h>

#include <cmath>

#include "sluice/rl/evaluation.h"

namespace sluice {
namespace {

constexpr Advantage kAll[] = {Advantage::kGroup, Advantage::kGroupMean, Advantage::kLeaveOneOut};

// In float32 mean and variance of seven times 0.1 are not exact, and dividing by a deviation of 1e-8 blows that up.
TEST(GroupAdvantages, AreExactlyZeroInAGroupWithoutSpread) {
  for (const auto kind : kAll) {
    for (const double reward : {0.1, 0.3, 0.35, 0.7, -1.0, 0.0}) {
      EXPECT_EQ(group_advantages(std::vector<double>(7, reward), kind), std::vector<double>(7, 0.0));
      EXPECT_EQ(group_advantages(std::vector<double>(7, static_cast<float>(reward)), kind),
                std::vector<double>(7, 0.0));
    }
    EXPECT_EQ(group_advantages(std::vector<double>{3.0}, kind), std::vector<double>{0.0});
  }
}

TEST(GroupAdvantages, FollowTheirFormulas) {
  const std::vector<double> rewards{1, 0, 0, 1, 0.5};  // mean 0.5, variance with n - 1: 0.25
  const auto grpo = group_advantages(rewards, Advantage::kGroup);
  const auto dr = group_advantages(rewards, Advantage::kGroupMean);
  const auto rloo = group_advantages(rewards, Advantage::kLeaveOneOut);
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    EXPECT_NEAR(grpo[i], (rewards[i] - 0.5) / (0.5 + 1e-6), 1e-15);
    EXPECT_NEAR(dr[i], rewards[i] - 0.5, 1e-15);
    EXPECT_NEAR(rloo[i], rewards[i] - (2.5 - rewards[i]) / 4, 1e-15);
  }
}

// A_t = sum over k of (gamma lambda)^k delta_t+k, written out.
TEST(GeneralizedAdvantages, AreTheDiscountedSumOfSurprises) {
  const std::vector<double> rewards{0.5, 0, -1, 2}, values{0.3, -0.2, 0.7, 1.1};
  for (const auto& s : {GaeSettings{}, {.gamma = 0.9, .lambda = 0.8}, {.gamma = 0.9, .lambda = 0}}) {
    const auto found = generalized_advantages(rewards, values, s);
    for (std::size_t t = 0; t < values.size(); ++t) {
      double sum = 0;
      for (auto k = t; k < values.size(); ++k) {
        const double next = k + 1 < values.size() ? values[k + 1] : 0;
        sum += std::pow(s.gamma * s.lambda, static_cast<double>(k - t)) * (rewards[k] + s.gamma * next - values[k]);
      }
      EXPECT_NEAR(found.advantages[t], sum, 1e-15);
      EXPECT_NEAR(found.returns[t], sum + values[t], 1e-15);
    }
  }
}

// lambda 1: what came, less what was expected; 0: the surprise of one token.
TEST(GeneralizedAdvantages, TrustRewardsOrValuesAsLambdaSays) {
  const std::vector<double> rewards{0, 0, 1}, values{0.2, 0.6, 0.9};
  const auto all = generalized_advantages(rewards, values, {.gamma = 1, .lambda = 1});
  const auto one = generalized_advantages(rewards, values, {.gamma = 1, .lambda = 0});
  for (std::size_t t = 0; t < 3; ++t) {
    EXPECT_NEAR(all.returns[t], 1, 1e-15);
    EXPECT_NEAR(all.advantages[t], 1 - values[t], 1e-15);
    EXPECT_NEAR(one.advantages[t], (t < 2 ? values[t + 1] : 1) - values[t], 1e-15);
  }
}

TEST(Whiten, BringsAllPartsTogetherToMeanZeroAndVarianceOne) {
  std::vector<std::vector<double>> parts{{1, 2}, {}, {6}};  // mean 3, variance 7
  whiten(parts);
  EXPECT_NEAR(parts[0][0], -2 / std::sqrt(7 + 1e-8), 1e-15);
  EXPECT_NEAR(parts[0][1], -1 / std::sqrt(7 + 1e-8), 1e-15);
  EXPECT_NEAR(parts[2][0], 3 / std::sqrt(7 + 1e-8), 1e-15);
  std::vector<std::vector<double>> single{{5}}, none;
  whiten(single);
  whiten(none);
  EXPECT_EQ(single, (std::vector<std::vector<double>>{{0}}));
}

TEST(ExplainedVariance, IsThePartThatValuesTell) {
  const std::vector<double> returns{0, 1, 2, 3};
  EXPECT_EQ(explained_variance(returns, returns), 1);
  EXPECT_EQ(explained_variance(std::vector<double>(4, 1.5), returns), 0);
  EXPECT_DOUBLE_EQ(explained_variance(std::vector<double>{0, 0.5, 1, 1.5}, returns), 0.75);
  EXPECT_EQ(explained_variance(std::vector<double>{1, 2}, std::vector<double>{3, 3}), 0);
}

TEST(OverlongPenalty, FallsOverTheBuffer) {
  const auto at = [](std::int64_t tokens) { return overlong_penalty(tokens, 100, 20); };
  EXPECT_EQ(at(80), 0);
  EXPECT_DOUBLE_EQ(at(81), -0.05);
  EXPECT_DOUBLE_EQ(at(90), -0.5);
  EXPECT_EQ(at(100), -1);
  EXPECT_EQ(at(101), -1);
}

TEST(PassAtK, IsTheChanceOfARightOneAmongK) {
  EXPECT_DOUBLE_EQ(pass_at_k(4, 1, 1), 0.25);
  EXPECT_DOUBLE_EQ(pass_at_k(4, 1, 2), 0.5);
  EXPECT_DOUBLE_EQ(pass_at_k(4, 2, 2), 1 - 1.0 / 6);
  EXPECT_EQ(pass_at_k(4, 0, 4), 0);
  EXPECT_EQ(pass_at_k(4, 3, 2), 1);
}

}  // namespace
}  // namespace sluice
