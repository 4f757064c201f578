// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/sft_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kVocabSize = 1024;  // of the bundled tokenizer

// Options whose data.path holds samples of the tokens [i, i, i], i below `count`.
SftOptions options_with(const TemporaryFolder& folder, int count) {
  SftOptions options;
  options.model.path = std::filesystem::path(SLUICE_SOURCE_DIR) / "examples/tiny/tokenizer";
  options.data.path = folder / "train.jsonl";
  std::ofstream file(options.data.path);
  for (int i = 0; i < count; ++i) file << fmt::format("{{\"tokens\": [{0}, {0}, {0}]}}\n", i);
  return options;
}

std::set<TokenId> first_tokens(const std::vector<Sample>& samples) {
  std::set<TokenId> found;
  for (const auto& sample : samples) found.insert(sample.tokens.at(0));
  return found;
}

TEST(SftData, APartIsKeptBackThatTheSeedAlonePicks) {
  const TemporaryFolder folder;
  auto options = options_with(folder, 20);
  options.eval.split = 0.25;
  const auto data = load_sft_data(options, kVocabSize);
  EXPECT_EQ(data.train.size(), 15U);
  EXPECT_EQ(data.eval.size(), 5U);
  auto all = first_tokens(data.train);
  all.merge(first_tokens(data.eval));
  EXPECT_EQ(all.size(), 20U);
  EXPECT_EQ(first_tokens(load_sft_data(options, kVocabSize).eval), first_tokens(data.eval));
  options.seed += 1;
  EXPECT_NE(first_tokens(load_sft_data(options, kVocabSize).eval), first_tokens(data.eval));
}

TEST(SftData, TheSmallestPartIsOneSampleAndOneStaysToTrainOn) {
  const TemporaryFolder folder;
  auto options = options_with(folder, 2);
  options.eval.split = 0.01;
  const auto data = load_sft_data(options, kVocabSize);
  EXPECT_EQ(data.train.size(), 1U);
  EXPECT_EQ(data.eval.size(), 1U);
  auto one = options_with(folder, 1);
  one.eval.split = 0.5;
  EXPECT_THAT(data_error([&] { load_sft_data(one, kVocabSize); }), HasSubstr("one sample cannot be split"));
}

TEST(SftData, ATokenOutsideTheVocabularyIsNamedWithItsLine) {
  const TemporaryFolder folder;
  const auto options = options_with(folder, 6);
  EXPECT_THAT(data_error([&] { load_sft_data(options, 5); }),
              HasSubstr("train.jsonl:6: token 0 is 5, outside the model's vocabulary of 5"));
}

}  // namespace
}  // namespace sluice
