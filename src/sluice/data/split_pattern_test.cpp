// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/split_pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "sluice/core/error.h"

namespace sluice {
namespace {

using testing::ElementsAre;

std::vector<std::string> split(std::string_view pattern, std::string_view text) {
  const SplitPattern compiled(pattern);
  SplitPattern::Pieces pieces(compiled, text);
  std::vector<std::string> result;
  while (const auto piece = pieces.next()) result.emplace_back(*piece);
  return result;
}

TEST(SplitPattern, MatchesAndGapsAreBothPieces) {
  EXPECT_THAT(split("b+", "abbcb"), ElementsAre("a", "bb", "c", "b"));
  EXPECT_THAT(split("b+", "bb"), ElementsAre("bb"));
  EXPECT_THAT(split("b+", "ac"), ElementsAre("ac"));
  EXPECT_THAT(split("b+", ""), ElementsAre());
}

TEST(SplitPattern, ClassesFollowUnicode16) {
  EXPECT_THAT(split("\\p{L}+", "a\u00e9\U0002EBF0\u6f22-"),
              ElementsAre("a\u00e9\U0002EBF0\u6f22", "-"));                           // Unicode 15.1
  EXPECT_THAT(split("[^\\p{L}\\p{M}]+", "a\u0897-"), ElementsAre("a\u0897", "-"));    // Unicode 16
  EXPECT_THAT(split("\\p{N}", "1\U0001E4F02"), ElementsAre("1", "\U0001E4F0", "2"));  // Unicode 15
}

TEST(SplitPattern, WhiteSpaceIsTheUnicodeProperty) {
  EXPECT_THAT(split("\\s+", "a\t\u0085\u3000b"), ElementsAre("a", "\t\u0085\u3000", "b"));
  EXPECT_THAT(split("\\S+", "a\u180e\u200bb c"), ElementsAre("a\u180e\u200bb", " ", "c"));
}

TEST(SplitPattern, CaseIsIgnoredAsUnicodeFoldsIt) {
  EXPECT_THAT(split("(?i:'s)", "a'S'\u017F"), ElementsAre("a", "'S", "'\u017F"));
}

TEST(SplitPattern, LongRunsNeedNoStack) {
  const std::string letters(2'000'000, 'x'), spaces(2'000'000, ' ');
  EXPECT_EQ(split("[\\p{L}\\p{M}]+|\\s+(?!\\S)|\\s+", letters + spaces + "y").size(), 4u);
  EXPECT_EQ(split("(?:x|y)+", std::string(20'000, 'x')).size(), 1u);  // too deep for the machine code's own stack
}

TEST(SplitPattern, RefusesWhatTheEnginesReadDifferently) {
  for (const std::string pattern : {"\\h", "\\p{Lu}", "\\P{L}", "[[:alpha:]]", "[a&&b]", "^a", "a$", "a.b", "(?<n>a)",
                                    "(*ANY)a", "a{1,2}+", "[]a]", "\\", "\\p{L", "(a", "a*", "\\1"}) {
    EXPECT_THROW(split(pattern, "x"), Error) << pattern;
  }
}

}  // namespace
}  // namespace sluice
