// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/answers.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(Gsm8k, TheGoldAnswerStandsBehindTheLastMark) {
  EXPECT_EQ(gsm8k_gold("5 * 4 = 20 #### 3\nso\n#### 1,234"), "1234");
  EXPECT_EQ(gsm8k_gold("72"), "72");
  EXPECT_EQ(gsm8k_gold("#### twelve"), std::nullopt);
  EXPECT_EQ(gsm8k_gold("#### 1.2.3"), std::nullopt);
}

TEST(Gsm8k, StrictWantsTheMark) {
  EXPECT_EQ(gsm8k_strict("first #### 3, then #### $1,018."), "1018");
  EXPECT_EQ(gsm8k_strict("#### -5"), "-5");
  EXPECT_EQ(gsm8k_strict("#### 3 and #### none"), "3");
  EXPECT_EQ(gsm8k_strict("the answer is 3"), std::nullopt);
  EXPECT_EQ(gsm8k_strict("####3"), std::nullopt);
  EXPECT_EQ(gsm8k_strict("#### 3" + std::string(301, ' ')), std::nullopt);
  EXPECT_EQ(gsm8k_strict(""), std::nullopt);
}

TEST(Gsm8k, FlexibleTakesTheLastNumber) {
  EXPECT_EQ(gsm8k_flexible("7 plus 5 is 12."), "12");
  EXPECT_EQ(gsm8k_flexible("it costs $1,250.50, not less"), "1250.50");
  EXPECT_EQ(gsm8k_flexible("minus -3 ."), "-3");
  EXPECT_EQ(gsm8k_flexible("12 or 1.2.3"), "12");
  EXPECT_EQ(gsm8k_flexible("none..."), std::nullopt);
}

TEST(EqualDecimals, ComparesValues) {
  EXPECT_TRUE(equal_decimals("18", "18.0"));
  EXPECT_TRUE(equal_decimals("018", "+18"));
  EXPECT_TRUE(equal_decimals("-0", "0.00"));
  EXPECT_TRUE(equal_decimals(".5", "0.50"));
  EXPECT_FALSE(equal_decimals("18", "-18"));
  EXPECT_FALSE(equal_decimals("18", "18.01"));
  EXPECT_FALSE(equal_decimals("", ""));
}

TEST(BoxedAnswer, IsTheLastWhoseBracesBalance) {
  EXPECT_EQ(boxed_answer("\\boxed{1} and \\boxed{\\frac{1}{2}}"), "\\frac{1}{2}");
  EXPECT_EQ(boxed_answer("\\boxed{7} then \\boxed{8"), "7");
  EXPECT_EQ(boxed_answer("\\fbox{3}"), "3");
  EXPECT_EQ(boxed_answer("\\boxed{"), std::nullopt);
  EXPECT_EQ(boxed_answer("42"), std::nullopt);
}

TEST(EqualMath, SeesThroughNotation) {
  const std::pair<const char*, const char*> same[] = {{"\\frac12", "\\dfrac{1}{2}"},
                                                      {"0.5", "1/2"},
                                                      {"\\frac1{72}", "\\frac{1}{72}"},
                                                      {"-\\frac{1}{2}", "-0.5"},
                                                      {"\\frac{-1}{2}", "-\\tfrac12"},
                                                      {"\\sqrt3", "\\sqrt{3}"},
                                                      {"50\\%", "50"},
                                                      {"\\$1,234.50", "1234.5"},
                                                      {"x=5", "5"},
                                                      {"5\\text{ cm}", "5"},
                                                      {"\\text{Monday}", "Monday"},
                                                      {"90^\\circ", "90"},
                                                      {"\\left(1,2\\right)", "(1, 2)"},
                                                      {"(0.5, 3]", "(\\frac{1}{2},3.0]"},
                                                      {"12,345,678", "12345678"},
                                                      {"2.", "2"},
                                                      {"\\frac{2}{4}", "\\frac{1}{2}"},
                                                      {"\\{1,2\\}", "\\{1, 2\\}"},
                                                      {"1,2", "1, 2.0"}};
  for (const auto& [a, b] : same) EXPECT_TRUE(equal_math(a, b)) << a << " " << b;
  const std::pair<const char*, const char*> different[] = {
      {"1", "2"},    {"(1,2)", "[1,2]"},        {"(1,2)", "(2,1)"}, {"1/0", "1/0.0"}, {"x", "y"}, {"\\sqrt{2}", "1.41"},
      {"12", "1,2"}, {"-\\frac12", "\\frac12"}, {"", "0"}};
  for (const auto& [a, b] : different) EXPECT_FALSE(equal_math(a, b)) << a << " " << b;
}

TEST(EqualMath, SurvivesAnything) {
  for (const auto* text : {"\\frac", "\\frac{", "\\frac{1", "\\frac{1}{", "\\sqrt", "\\text{", "{{{{", "((((((((,",
                           "\\", "\\frac{\\frac{1}{2}}{3}", "9999999999999999999999999999/7"}) {
    equal_math(text, "1");
    equal_math(text, text);
    boxed_answer(text);
  }
}

}  // namespace
}  // namespace sluice
