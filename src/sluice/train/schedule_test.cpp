// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/schedule.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(Schedule, WarmsUpFromAboveZeroToThePeak) {
  const Schedule s{.shape = ScheduleShape::kConstant, .lr = 8, .warmup_steps = 4, .total_steps = 10};
  EXPECT_EQ(learning_rate(s, 1), 2);
  EXPECT_EQ(learning_rate(s, 4), 8);
  EXPECT_EQ(learning_rate(s, 5), 8);
  EXPECT_EQ(learning_rate(s, 10), 8);
}

TEST(Schedule, LinearAndCosineEndAtTheLowestRate) {
  for (const auto shape : {ScheduleShape::kLinear, ScheduleShape::kCosine}) {
    const Schedule s{.shape = shape, .lr = 10, .min_lr_ratio = 0.1, .warmup_steps = 0, .total_steps = 10};
    EXPECT_DOUBLE_EQ(learning_rate(s, 10), 1);
    EXPECT_DOUBLE_EQ(learning_rate(s, 5), 5.5);  // half way, where both shapes cross
  }
}

TEST(Schedule, WsdIsStableUntilItsDecay) {
  const Schedule s{.shape = ScheduleShape::kWsd, .lr = 4, .warmup_steps = 2, .decay_steps = 4, .total_steps = 20};
  EXPECT_EQ(learning_rate(s, 16), 4);
  EXPECT_EQ(learning_rate(s, 18), 2);
  EXPECT_EQ(learning_rate(s, 20), 0);
}

TEST(Schedule, AWarmupAsLongAsTheRunIsAllWarmup) {
  const Schedule s{.shape = ScheduleShape::kCosine, .lr = 1, .warmup_steps = 5, .total_steps = 5};
  EXPECT_EQ(learning_rate(s, 5), 1);
}

}  // namespace
}  // namespace sluice
