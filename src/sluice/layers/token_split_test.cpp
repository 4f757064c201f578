// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/token_split.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

using Bounds = std::vector<std::int64_t>;

TEST(PieceBounds, ShortPacksAreCutEvenly) {
  EXPECT_EQ(piece_bounds(Bounds{10}, 3, 1), (Bounds{0, 3, 6, 10}));
  EXPECT_EQ(piece_bounds(Bounds{300, 1, 600}, 4, 1), (Bounds{0, 225, 450, 675, 901}));
  EXPECT_EQ(piece_bounds(Bounds{}, 2, 2), (Bounds{0, 0, 0, 0, 0}));
}

TEST(PieceBounds, ContextRanksAreCutAtTheNearestChunkOfTheSequence) {
  EXPECT_EQ(piece_bounds(Bounds{1000}, 2, 1), (Bounds{0, 512, 1000}));
  EXPECT_EQ(piece_bounds(Bounds{300, 1, 600}, 2, 1), (Bounds{0, 301 + 128, 901}));
  EXPECT_EQ(piece_bounds(Bounds{510, 514}, 2, 1), (Bounds{0, 510, 1024}));  // 512 is nearest to the second's beginning
  EXPECT_EQ(piece_bounds(Bounds{510, 4, 510}, 2, 1), (Bounds{0, 510, 1024}));
  EXPECT_EQ(piece_bounds(Bounds{60, 471, 493}, 2, 1), (Bounds{0, 60 + 448, 1024}));
  EXPECT_EQ(piece_bounds(Bounds{514, 510}, 2, 1), (Bounds{0, 512, 1024}));
  EXPECT_EQ(piece_bounds(Bounds{60, 455, 509}, 2, 1), (Bounds{0, 60 + 448, 1024}));
  EXPECT_EQ(piece_bounds(Bounds{30, 483, 511}, 2, 1), (Bounds{0, 30 + 483, 1024}));  // beyond the sequence's end: there
}

TEST(PieceBounds, TensorRanksShareAContextRanksPieceEvenly) {
  EXPECT_EQ(piece_bounds(Bounds{1000}, 2, 3), (Bounds{0, 170, 341, 512, 674, 837, 1000}));
  EXPECT_EQ(piece_bounds(Bounds{7}, 1, 2), (Bounds{0, 3, 7}));
}

}  // namespace
}  // namespace sluice
