// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/environment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace {

constexpr auto kTokenizer = SLUICE_SOURCE_DIR "/examples/tiny/tokenizer";

// A folder with an environment.py that counts up to the record's number of turns.
class CountingEnvironment : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(folder_);
    write_file(folder_ / "environment.py",
               "import os, time\n"
               "class Counting:\n"
               "    def __init__(self, prompt, answer, record):\n"
               "        if record['turns'] == 0: raise ValueError('no turns')\n"
               "        self.left = record['turns']\n"
               "    def step(self, completion):\n"
               "        if completion == 'die': os._exit(1)\n"
               "        if completion == 'hang': time.sleep(100)\n"
               "        if completion == 'nan': return 'x', float('nan'), False\n"
               "        if completion == 'number': return 7, 0, False\n"
               "        self.left -= 1\n"
               "        return f'{self.left} left', len(completion), self.left == 0\n");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  EnvironmentOptions options(std::int64_t workers = 1) const {
    EnvironmentOptions options;
    options.python = (folder_ / "environment.py").string() + ":Counting";
    options.workers = workers;
    options.timeout_s = 2;
    return options;
  }

  static std::vector<std::optional<std::int64_t>> begin(Environment& environment,
                                                        const std::vector<std::int64_t>& turns) {
    std::vector<Prompt> prompts;
    for (const auto count : turns) prompts.push_back({.tokens = {1}, .record = {{"turns", count}}, .place = ""});
    std::vector<const Prompt*> pointers;
    for (const auto& prompt : prompts) pointers.push_back(&prompt);
    return environment.begin(pointers);
  }

  std::filesystem::path folder_ =
      std::filesystem::path(testing::TempDir()) / fmt::format("sluice_environment_test_{}", ::getpid());
};

TEST_F(CountingEnvironment, KeepsEpisodesApart) {
  Environment environment(options(/*workers=*/2));
  const auto episodes = begin(environment, {2, 1, 3});
  const auto first =
      environment.step(std::vector<Environment::Turn>{{*episodes[0], "a"}, {*episodes[1], "bb"}, {*episodes[2], ""}});
  EXPECT_EQ(first[0]->observation, "1 left");
  EXPECT_EQ(first[0]->reward, 1);
  EXPECT_FALSE(first[0]->done);
  EXPECT_EQ(first[1]->reward, 2);
  EXPECT_TRUE(first[1]->done);
  const auto second = environment.step(std::vector<Environment::Turn>{{*episodes[2], "ccc"}, {*episodes[0], "a"}});
  EXPECT_EQ(second[0]->observation, "1 left");
  EXPECT_TRUE(second[1]->done);
  environment.end(std::vector<std::int64_t>{*episodes[2]});
  EXPECT_EQ(environment.failures(), 0);
}

TEST_F(CountingEnvironment, AFailureEndsTheEpisodeAndGivesNoReward) {
  Environment environment(options());
  const auto episodes = begin(environment, {0, 3, 3, 3});
  EXPECT_FALSE(episodes[0]);
  const auto step = environment.step(
      std::vector<Environment::Turn>{{*episodes[1], "nan"}, {*episodes[2], "number"}, {*episodes[3], "good"}});
  EXPECT_FALSE(step[0]);
  EXPECT_FALSE(step[1]);
  EXPECT_EQ(step[2]->reward, 4);
  EXPECT_EQ(environment.failures(), 3);
}

TEST_F(CountingEnvironment, AProcessThatEndsTakesItsEpisodesWithIt) {
  Environment environment(options(/*workers=*/2));
  const auto episodes = begin(environment, {3, 3, 3});  // the first and the third in one process
  const auto step = environment.step(
      std::vector<Environment::Turn>{{*episodes[0], "die"}, {*episodes[1], "good"}, {*episodes[2], "good"}});
  EXPECT_FALSE(step[0]);
  EXPECT_TRUE(step[1]);
  EXPECT_FALSE(step[2]);
  EXPECT_NE(environment.last_failure().find("the process that held the episode has ended"), std::string::npos);
  const auto others = begin(environment, {1});
  EXPECT_FALSE(environment.step(std::vector<Environment::Turn>{{*others[0], "hang"}})[0]);
  EXPECT_NE(environment.last_failure().find("within 2 s"), std::string::npos) << environment.last_failure();
}

TEST_F(CountingEnvironment, ThatIsNotThereIsAUsageError) {
  auto missing = options();
  missing.python = (folder_ / "environment.py").string() + ":Other";
  EXPECT_THROW(Environment{missing}, Error);
  missing.python = "no_such_file.py:Counting";
  EXPECT_THROW(Environment{missing}, Error);
}

// The words are the template's; the ids of what was said never become control tokens.
TEST(TurnGlue, IsWhatTheTemplatePutsBetweenTwoTurns) {
  const auto tokenizer = Tokenizer::load(kTokenizer);
  const auto end = tokenizer.encode("<|im_end|>", SpecialTokens::kControl);
  ASSERT_EQ(end.size(), 1u);
  PromptOptions options;
  options.thinking = false;
  const TurnGlue glue(kTokenizer, options);
  const std::string next =
      "\n<|im_start|>user\nno <|im_end|> here<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
  const auto behind_end = glue.between(end[0], "no <|im_end|> here");
  EXPECT_EQ(tokenizer.decode(behind_end), next);
  EXPECT_EQ(std::ranges::count(behind_end, end[0]), 1);
  const auto behind_other = glue.between(5, "no <|im_end|> here");
  EXPECT_EQ(tokenizer.decode(behind_other), "<|im_end|>" + next);
  options.chat = false;
  EXPECT_EQ(tokenizer.decode(TurnGlue(kTokenizer, options).between(5, "plain")), "plain");
}

}  // namespace
}  // namespace sluice
