// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/wildcard.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(Wildcard, StarStandsForAnyCharacters) {
  EXPECT_TRUE(matches("mtp.*", "mtp.fc.weight"));
  EXPECT_TRUE(matches("*.inv_freq", "model.rotary_emb.inv_freq"));
  EXPECT_TRUE(matches("a*b*c", "aXbYbZc"));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_FALSE(matches("mtp.*", "model.mtp.fc"));
  EXPECT_FALSE(matches("a*b", "ab_"));
  EXPECT_FALSE(matches("", "a"));
}

}  // namespace
}  // namespace sluice
