// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/stop.h"

#include <gtest/gtest.h>

#include "sluice/core/files.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

// All that is released of a text that comes in the given pieces.
std::string released(const std::vector<std::string>& strings, const std::vector<std::string>& pieces, bool& found) {
  StopStrings stops(strings);
  std::string text;
  for (const auto& piece : pieces) text += stops.push(piece);
  found = stops.found();
  return text + stops.finish();
}

TEST(StopStrings, CutTheTextBeforeTheFirstOneHoweverItIsSplit) {
  const std::string text = "one two\n\nUser: three";
  for (std::size_t a = 0; a <= text.size(); ++a) {
    for (std::size_t b = a; b <= text.size(); ++b) {
      bool found = false;
      EXPECT_EQ(released({"User:", "\n\n"}, {text.substr(0, a), text.substr(a, b - a), text.substr(b)}, found),
                "one two");
      EXPECT_TRUE(found);
    }
  }
}

TEST(StopStrings, HoldBackOnlyWhatMayBeginOne) {
  StopStrings stops({"END"});
  EXPECT_EQ(stops.push("abE"), "ab");
  EXPECT_EQ(stops.push("N"), "");
  EXPECT_EQ(stops.push("EN"), "EN");
  EXPECT_FALSE(stops.found());
  EXPECT_EQ(stops.finish(), "EN");
}

TEST(StopStrings, WithoutAMatchNothingIsLost) {
  bool found = true;
  EXPECT_EQ(released({"aab"}, {"a", "a", "a", "c", "aa"}, found), "aaacaa");
  EXPECT_FALSE(found);
  EXPECT_EQ(released({}, {"a", "b"}, found), "ab");
  EXPECT_EQ(released({""}, {"a", "b"}, found), "ab");  // an empty string stops nothing
  EXPECT_FALSE(found);
}

TEST(StopStrings, AMatchThatOverlapsAFailedOneIsFound) {
  bool found = false;
  EXPECT_EQ(released({"aab"}, {"a", "a", "a", "b", "x"}, found), "a");
  EXPECT_TRUE(found);
}

class StopIds : public testing::Test {
 protected:
  TemporaryFolder folder;
};

TEST_F(StopIds, AreTheUnionOfAllThatNameOne) {
  write_file(folder / "config.json", R"({"eos_token_id": 7, "text_config": {"eos_token_id": 5}})");
  EXPECT_EQ(stop_ids(folder.path(), std::nullopt), (std::vector<TokenId>{5, 7}));
  write_file(folder / "generation_config.json", R"({"eos_token_id": [9, 5]})");
  EXPECT_EQ(stop_ids(folder.path(), std::nullopt), (std::vector<TokenId>{5, 7, 9}));
  const auto tokenizer = Tokenizer::load(SLUICE_SOURCE_DIR "/examples/tiny/tokenizer");
  EXPECT_EQ(stop_ids(folder.path(), tokenizer), (std::vector<TokenId>{5, 7, 9, tokenizer.eos_id().value()}));
}

TEST_F(StopIds, MayBeAbsent) {
  write_file(folder / "config.json", R"({"eos_token_id": null})");
  EXPECT_TRUE(stop_ids(folder.path(), std::nullopt).empty());
}

TEST_F(StopIds, OfAnotherKindAreRefused) {
  for (const auto* value : {"\"</s>\"", "-1", "1.5", "[3, null]", "99999999999"}) {
    write_file(folder / "config.json", fmt::format(R"({{"eos_token_id": {}}})", value));
    const auto error = data_error([&] { stop_ids(folder.path(), std::nullopt); });
    EXPECT_NE(error.find("eos_token_id"), std::string::npos) << value;
  }
}

}  // namespace
}  // namespace sluice
