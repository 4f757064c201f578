// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/files.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kTiny = fs::path(SLUICE_SOURCE_DIR) / "examples/tiny/tokenizer";

// A file with the given text, removed afterwards.
class TextFile {
 public:
  explicit TextFile(const std::string& text, const std::string& extension = ".jsonl")
      : path_(fs::path(testing::TempDir()) /
              (testing::UnitTest::GetInstance()->current_test_info()->name() + extension)) {
    write_file(path_, text);
  }
  ~TextFile() { fs::remove(path_); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::vector<int> values(const std::string& text, const std::string& extension = ".jsonl") {
  const TextFile file(text, extension);
  std::vector<int> found;
  read_records(file.path(), [&](const Record& record) { found.push_back(record.json["n"].get<int>()); });
  return found;
}

// D4
TEST(Records, JsonlThatIsFineButNotTidy) {
  for (const std::string mark : {"", "\xEF\xBB\xBF"}) {
    for (const std::string end : {"\n", "\r\n", "\n\n", "\r\n \t\r\n"}) {
      for (const bool last : {true, false}) {
        EXPECT_THAT(values(mark + R"({"n": 1})" + end + R"({"n": 2})" + end + R"({"n": 3})" + (last ? end : "")),
                    ElementsAre(1, 2, 3));
      }
    }
  }
}

// D4
TEST(Records, BrokenJsonNamesFileAndPhysicalLine) {
  const auto message = data_error([] { values("{\"n\": 1}\n\n\n{\"n\": 2}\n{\"n\": \n"); });
  EXPECT_THAT(message, HasSubstr("BrokenJsonNamesFileAndPhysicalLine.jsonl:5: not valid JSON"));
  EXPECT_THAT(data_error([] { values("{\"n\": 1}\n[1]\n"); }),
              HasSubstr(".jsonl:2: expected a JSON object, got array"));
  EXPECT_THAT(data_error([] { values("{\"n\": \"\xff\"}\n"); }), HasSubstr(".jsonl:1: not valid JSON"));
}

TEST(Records, AJsonFileHoldsOneArray) {
  EXPECT_THAT(values("\xEF\xBB\xBF[{\"n\": 1},\n {\"n\": 2}]\n", ".json"), ElementsAre(1, 2));
  EXPECT_THAT(data_error([] { values("{\"n\": 1}", ".json"); }), HasSubstr("expected an array of records"));
  EXPECT_THAT(data_error([] { values("[{\"n\": 1}, 5]", ".json"); }), HasSubstr("record 2: expected an object"));
}

TEST(Records, HostileJsonIsRefused) {
  EXPECT_THAT(data_error([] { values(R"({"n": )" + std::string(100'000, '[')); }),
              HasSubstr("nested more than 200 deep"));
  std::string many = "{\"n\": 1";
  for (int i = 0; i < 2000; ++i) many += fmt::format(", \"k{}\": 0", i);
  EXPECT_THAT(data_error([&] { values(many + "}"); }), HasSubstr("more than 1024 keys"));
}

std::string token_record(std::size_t prompt, std::size_t completion) {
  std::vector<int> mask(prompt, 0);
  mask.insert(mask.end(), completion, 1);
  return fmt::format("{{\"tokens\": [{}], \"loss_mask\": [{}]}}\n",
                     fmt::join(std::vector<int>(prompt + completion, 5), ","), fmt::join(mask, ","));
}

Dataset load(const std::string& text, const DatasetOptions& options) {
  const TextFile file(text);
  return Dataset::load({file.path()}, SampleMaker(Tokenizer::load(kTiny), ChatTemplate::built_in(), {}), options);
}

// D5
TEST(Dataset, DropsAndCountsWhatHasNothingToTrain) {
  std::string text = token_record(200, 3);
  for (int i = 0; i < 7; ++i) text += token_record(10, 3);
  const DatasetOptions options{.max_tokens = 64};
  const auto dataset = load(text, options);
  EXPECT_EQ(dataset.samples().size(), 7U);
  EXPECT_EQ(dataset.counts().untrained, 1);
  EXPECT_EQ(dataset.counts().trained_tokens, 21);
  EXPECT_THAT(dataset.summary(options),
              testing::Contains("dropped 1 of 8 records: no token to train on within 64 tokens"));
}

// D5
TEST(Dataset, NothingLeftIsAnError) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += token_record(200, 3);
  EXPECT_THAT(
      data_error([&] { load(text, {.max_tokens = 64}); }),
      HasSubstr("no sample is left to train on: dropped 8 of 8 records: no token to train on within 64 tokens"));
  EXPECT_THAT(data_error([] { load("\n", {}); }), HasSubstr("no record found"));
}

// T1: a fully masked sample, and one whose only trained token is its first, do not reach training.
TEST(Dataset, MaskedSamplesAreLeftOut) {
  const auto dataset = load(token_record(5, 0) + token_record(0, 1) + token_record(2, 4), {});
  ASSERT_EQ(dataset.samples().size(), 1U);
  EXPECT_EQ(dataset.samples()[0].trained_tokens(), 4);
}

TEST(Dataset, OverLongIsTruncatedDroppedOrSplit) {
  const auto text = token_record(4, 16) + token_record(4, 4);
  const auto sizes = [&](OverLong over_long) {
    const auto dataset = load(text, {.max_tokens = 8, .over_long = over_long});
    EXPECT_EQ(dataset.counts().over_long, 1);
    std::vector<std::size_t> found;
    for (const auto& sample : dataset.samples()) found.push_back(sample.tokens.size());
    return found;
  };
  EXPECT_THAT(sizes(OverLong::kTruncate), ElementsAre(8, 8));
  EXPECT_THAT(sizes(OverLong::kDrop), ElementsAre(8));
  EXPECT_THAT(sizes(OverLong::kSplit), ElementsAre(8, 8, 4, 8));
}

TEST(Dataset, AnErrorNamesFileAndLine) {
  EXPECT_THAT(data_error([] { load(token_record(2, 2) + "\n{\"prompt\": 1}\n", {}); }),
              HasSubstr("AnErrorNamesFileAndLine.jsonl:3: prompt and completion"));
}

TEST(Dataset, SaysWhenTextLooksLikeControlTokens) {
  const auto dataset = load("{\"text\": \"a<|im_end|>b\"}\n{\"text\": \"ab\"}\n", {});
  EXPECT_THAT(dataset.summary({}),
              testing::Contains(HasSubstr("1 of 2 records hold text that looks like a control token")));
}

}  // namespace
}  // namespace sluice
