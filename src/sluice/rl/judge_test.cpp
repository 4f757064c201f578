// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/judge.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using Rewards = std::vector<std::optional<double>>;

std::vector<Json> requests(std::initializer_list<const char*> completions) {
  std::vector<Json> list;
  for (const auto* text : completions) {
    list.push_back({{"prompt", ""}, {"completion", text}, {"answer", ""}, {"record", Json::object()}});
  }
  return list;
}

struct Wanted {
  std::vector<std::string> command;
  JudgeLimits limits;
};

void expect_usage_error(const Wanted& wanted, const std::string& text) {
  try {
    const Judge judge(wanted.command, wanted.limits);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// A folder with a reward.py that holds this function body.
class PythonFunction : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::vector<std::string> function(const std::string& body) {
    write_file(folder_ / "reward.py", "import os, time\ndef reward(prompt, completion, answer, record):\n" + body);
    return python_judge((folder_ / "reward.py").string() + ":reward");
  }

  std::filesystem::path folder_ =
      std::filesystem::path(testing::TempDir()) / fmt::format("sluice_judge_test_{}", ::getpid());
};

TEST_F(PythonFunction, GivesEachRequestItsOwnReward) {
  Judge judge(function("    print('printing is harmless')\n    return len(completion)\n"), {.workers = 2});
  EXPECT_EQ(judge.judge(requests({"a", "bbb", "", "cc"})), (Rewards{1, 3, 0, 2}));
  EXPECT_EQ(judge.judge(requests({"dddd"})), Rewards{4});
  EXPECT_EQ(judge.failures(), 0);
}

TEST_F(PythonFunction, AFailureIsTriedAgainAndNeverAReward) {
  Judge judge(function("    return {'raise': lambda: 1 / 0, 'nan': lambda: float('nan'), 'text': lambda: 'much',\n"
                       "            'none': lambda: None, 'good': lambda: 0.5}[completion]()\n"),
              {.retries = 1});
  EXPECT_EQ(judge.judge(requests({"raise", "good", "nan", "text", "none", "good"})),
            (Rewards{std::nullopt, 0.5, std::nullopt, std::nullopt, std::nullopt, 0.5}));
  EXPECT_EQ(judge.failures(), 8);
}

TEST_F(PythonFunction, OneThatHangsOrDiesIsEndedAndReplaced) {
  Judge judge(function("    if completion == 'hang': time.sleep(100)\n"
                       "    if completion == 'die': os.kill(os.getpid(), 9)\n"
                       "    return 1\n"),
              {.worker = {.timeout_s = 0.5}, .retries = 0});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(judge.judge(requests({"hang"})), Rewards{std::nullopt});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(judge.judge(requests({"good", "die", "good"})), (Rewards{1, std::nullopt, 1}));
  EXPECT_EQ(judge.failures(), 2);
}

TEST_F(PythonFunction, OneThatFailsOnceIsGivenItsRewardByTheSecondTry) {
  const auto mark = (folder_ / "tried").string();
  Judge judge(function("    if not os.path.exists('" + mark + "'):\n        open('" + mark +
                       "', 'w')\n        os._exit(1)\n    return 7\n"),
              {.retries = 1});
  EXPECT_EQ(judge.judge(requests({"x"})), Rewards{7});
  EXPECT_EQ(judge.failures(), 1);
}

TEST_F(PythonFunction, MemoryIsLimited) {
  Judge judge(function("    return len(bytearray(600 << 20)) if completion == 'much' else 1\n"),
              {.worker = {.memory_gib = 0.5}, .retries = 0});
  EXPECT_EQ(judge.judge(requests({"much", "little"})), (Rewards{std::nullopt, 1}));
}

TEST_F(PythonFunction, LongTextsAndSpecialCharactersArrive) {
  Judge judge(function("    return len(completion) if completion.endswith('\\u2028\\n\\u00e4') else -1\n"), {});
  std::string text(300000, 'x');
  text += "\u2028\n\u00e4";
  EXPECT_EQ(judge.judge(requests({text.c_str()})), Rewards{300003});
}

// A limit of its own: the time for an answer does not begin before.
TEST_F(PythonFunction, MayTakeItsTimeToLoad) {
  write_file(folder_ / "slow.py", "import time\ntime.sleep(1)\ndef reward(**request): return 1\n");
  const auto command = python_judge((folder_ / "slow.py").string() + ":reward");
  Judge judge(command, {.worker = {.timeout_s = 0.5}});
  EXPECT_EQ(judge.judge(requests({"x"})), Rewards{1});
  EXPECT_EQ(judge.failures(), 0);
  expect_usage_error({{"sleep", "100"}, {.worker = {.load_timeout_s = 0.2}}}, "was not ready within 0.2 s");
}

TEST_F(PythonFunction, ThatIsReplacedHasItsTimeToLoadAgain) {
  write_file(folder_ / "slow.py",
             "import os, time\ntime.sleep(1)\ndef reward(completion, **request):\n    "
             "if completion == 'die': os._exit(1)\n    return 1\n");
  Judge judge(python_judge((folder_ / "slow.py").string() + ":reward"), {.worker = {.timeout_s = 0.5}, .retries = 0});
  EXPECT_EQ(judge.judge(requests({"die", "x"})), (Rewards{std::nullopt, 1}));
  EXPECT_EQ(judge.failures(), 1);
}

TEST_F(PythonFunction, ThatCannotBeLoadedIsAUsageError) {
  auto command = function("    return 1\n");
  command.back() = "other";
  expect_usage_error({command, {}}, "has no attribute 'other'");
  expect_usage_error({{"true"}, {}}, "ended before it was ready");
  expect_usage_error({{"echo", "hello"}, {}}, "began with hello");
  expect_usage_error({{"/no/such/program"}, {}}, "cannot start /no/such/program");
}

TEST(Judge, GarbageOnStandardOutputIsAFailure) {
  for (const auto* script :
       {"while read x; do echo rubbish; done", "while read x; do echo '{\"id\": 99, \"reward\": 1}'; done",
        "while read x; do echo '{\"id\": 0, \"reward\": NaN}'; done",
        "while read x; do printf '{\"id\": 0, \"reward\": 1}\\nmore\\n'; done",
        "while read x; do echo '{\"id\": 0}'; done", "exit 0"}) {
    Judge judge({"sh", "-c", std::string("echo '{\"ready\": true}'; ") + script}, {.retries = 0});
    EXPECT_EQ(judge.judge(requests({"x"})), Rewards{std::nullopt}) << script;
    EXPECT_EQ(judge.failures(), 1);
  }
}

TEST(Judge, APlaceThatIsNoFunctionIsAUsageError) {
  EXPECT_THROW(python_judge("no colon"), Error);
  EXPECT_THROW(python_judge("/no/such/file.py:function"), Error);
}

}  // namespace
}  // namespace sluice
