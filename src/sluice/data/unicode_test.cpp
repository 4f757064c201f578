// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/unicode.h"

#include <gtest/gtest.h>

#include "sluice/data/utf8.h"

namespace sluice {
namespace {

TEST(ToNfc, Composes) {
  EXPECT_EQ(to_nfc("cafe\u0301 e\u0301e"), "caf\u00e9 \u00e9e");
  EXPECT_EQ(to_nfc("\u212b"), "\u00c5");
  EXPECT_EQ(to_nfc("\u1100\u1161\u11a8"), "\uac01");  // Hangul
  EXPECT_EQ(to_nfc("\u304b\u3099"), "\u304c");        // kana and its voicing mark
  EXPECT_EQ(to_nfc("\u0f73"), "\u0f71\u0f72");        // excluded from composition
  EXPECT_EQ(to_nfc("\ufb01"), "\ufb01");              // compatibility forms stay
}

TEST(ToNfc, OrdersMarksByTheirClass) {
  EXPECT_EQ(to_nfc("a\u0301\u0316"), "\u00e1\u0316");
  EXPECT_EQ(to_nfc("q\u0307\u0323"), "q\u0323\u0307");
  EXPECT_EQ(to_nfc("a\u0308\u0301"), "\u00e4\u0301");  // the same class keeps its order
}

TEST(ToNfc, LeavesAloneWhatNothingChanges) {
  EXPECT_EQ(to_nfc(""), "");
  for (const std::string text :
       {"plain", "na\u00efve", "\u6f22\u5b57", "\U0001F468\u200d\U0001F469", "\u0301", "\ufffe"}) {
    EXPECT_EQ(to_nfc(text), text);
  }
  EXPECT_EQ(to_nfc(std::string_view("a\0b", 3)), std::string_view("a\0b", 3));
}

TEST(ToNfc, MarksThatTheReferenceDoesNotKnowSeparate) {
  EXPECT_EQ(to_nfc("a\u1ac1\u0301"), "a\u1ac1\u0301");
  EXPECT_EQ(to_nfc("e\u0301\u1ac1e\u0301"), "\u00e9\u1ac1\u00e9");
}

TEST(ToNfc, IsIdempotentOnEveryCodePoint) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text = "a";
    append_utf8(text, c);
    const auto once = to_nfc(text + "\u0301");
    ASSERT_EQ(to_nfc(once), once) << std::hex << static_cast<std::uint32_t>(c);
  }
}

}  // namespace
}  // namespace sluice
