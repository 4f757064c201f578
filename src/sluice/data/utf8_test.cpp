// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/utf8.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(Utf8, EveryCodePointIsReadAsItIsWritten) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    std::string text;
    append_utf8(text, c);
    const bool is_surrogate = c >= 0xD800 && c <= 0xDFFF;
    const auto step = utf8_step(text, 0);
    ASSERT_EQ(step.kind == Utf8Kind::kCharacter, !is_surrogate) << std::hex << static_cast<std::uint32_t>(c);
    if (is_surrogate) continue;
    ASSERT_EQ(step.code_point, c);
    ASSERT_EQ(step.length, text.size());
  }
}

TEST(Utf8, FindsTheFirstBrokenByte) {
  EXPECT_EQ(find_broken_utf8(""), std::nullopt);
  EXPECT_EQ(find_broken_utf8("plain text, longer than eight bytes \u00e9\u6f22\U0010FFFF"), std::nullopt);
  EXPECT_EQ(find_broken_utf8("\x80"), 0u);       // nothing to continue
  EXPECT_EQ(find_broken_utf8("a\xC0\xAF"), 1u);  // long forms of "/"
  EXPECT_EQ(find_broken_utf8("a\xE0\x80\xAF"), 1u);
  EXPECT_EQ(find_broken_utf8("a\xF0\x80\x80\xAF"), 1u);
  EXPECT_EQ(find_broken_utf8("12345678a\xED\xA0\x80"), 9u);  // U+D800
  EXPECT_EQ(find_broken_utf8("\xF4\x90\x80\x80"), 0u);       // U+110000
  EXPECT_EQ(find_broken_utf8("\xF5\x80\x80\x80"), 0u);
  EXPECT_EQ(find_broken_utf8("\u00e9\xE2\x82"), 2u);  // ends too early
  EXPECT_EQ(find_broken_utf8("\xE2\x82 "), 0u);
}

TEST(Utf8, BrokenPartsBecomeOneReplacementEach) {  // the examples of the Unicode standard, section 3.9, table 3-8
  EXPECT_EQ(replace_broken_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(replace_broken_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(replace_broken_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), "\uFFFD\uFFFD\uFFFD\uFFFD\x41");
}

TEST(Utf8, OnlyAnUnfinishedCharacterIsHeldBack) {
  EXPECT_EQ(unfinished_utf8_bytes(""), 0u);
  EXPECT_EQ(unfinished_utf8_bytes("a\u00e9"), 0u);
  EXPECT_EQ(unfinished_utf8_bytes("a\xC3"), 1u);
  EXPECT_EQ(unfinished_utf8_bytes("a\xE2\x82"), 2u);
  EXPECT_EQ(unfinished_utf8_bytes("a\xF0\x9F\x98"), 3u);
  EXPECT_EQ(unfinished_utf8_bytes("a\xED\xA0"), 0u);  // no character begins so
  EXPECT_EQ(unfinished_utf8_bytes("a\x82\x82"), 0u);
}

}  // namespace
}  // namespace sluice
