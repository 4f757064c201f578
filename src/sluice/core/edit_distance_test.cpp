// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/edit_distance.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(EditDistance, CountsLettersAndSwaps) {
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("seed", "sede"), 1U);
}

}  // namespace
}  // namespace sluice
