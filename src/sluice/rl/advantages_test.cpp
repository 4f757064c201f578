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
