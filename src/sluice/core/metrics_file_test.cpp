// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/metrics_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

void append(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::app | std::ios::binary) << text;
}

TEST(MetricsFile, HoldsOneObjectALineWithUnroundedNumbers) {
  const TemporaryFolder folder;
  const double loss = 1.0 / 3.0;
  MetricsFile file(folder / "metrics.jsonl");
  file.write(1, Json{{"train/loss", loss}, {"train/tokens", 4096}});
  // Each line is there as soon as it is written.
  const auto text = read_file(folder / "metrics.jsonl");
  EXPECT_EQ(text, "{\"step\":1,\"train/loss\":0.3333333333333333,\"train/tokens\":4096}\n");
  EXPECT_EQ(Json::parse(text)["train/loss"].get<double>(), loss);
}

TEST(MetricsFile, WritesNullForWhatJsonCannotSay) {
  const TemporaryFolder folder;
  MetricsFile file(folder / "m");
  file.write(1, Json{{"loss", std::numeric_limits<double>::quiet_NaN()}, {"text", "\xff"}});
  EXPECT_EQ(read_file(folder / "m"), "{\"step\":1,\"loss\":null,\"text\":\"\xef\xbf\xbd\"}\n");
}

TEST(MetricsFile, ForgetsStepsThatAResumedRunTakesAgain) {
  const TemporaryFolder folder;
  {
    MetricsFile file(folder / "m");
    for (int step = 1; step <= 5; ++step) file.write(step, Json{{"run", 1}});
    file.write(5, Json{{"eval", 1}});
  }
  MetricsFile file(folder / "m", 3);
  for (int step = 4; step <= 5; ++step) file.write(step, Json{{"run", 2}});
  EXPECT_EQ(read_file(folder / "m"),
            "{\"step\":1,\"run\":1}\n{\"step\":2,\"run\":1}\n{\"step\":3,\"run\":1}\n"
            "{\"step\":4,\"run\":2}\n{\"step\":5,\"run\":2}\n");
}

TEST(MetricsFile, DropsALineThatAKilledProcessLeftHalfWritten) {
  const TemporaryFolder folder;
  append(folder / "m", "{\"step\":1}\n{\"step\":2,\"lo");
  MetricsFile file(folder / "m", 7);
  file.write(2, Json::object());
  EXPECT_EQ(read_file(folder / "m"), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(MetricsFile, RefusesAFileOfAnotherKind) {
  const TemporaryFolder folder;
  for (const auto* bad : {"no json\n", "[1]\n", "{\"loss\":1}\n", "{\"step\":\"1\"}\n", "\n"}) {
    write_file(folder / "m", std::string("{\"step\":1}\n") + bad);
    try {
      MetricsFile file(folder / "m", 9);
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kData);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("m:2: not a line of metrics"));
    }
  }
}

// A limit on the file's size stands for a full disk: the kernel takes a part of the line, then nothing.
TEST(MetricsFile, TakesBackHalfALineWhenTheDiskIsFull) {
  const TemporaryFolder folder;
  const int status = run_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 40, .rlim_max = 40};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    MetricsFile file(folder / "m");
    file.write(1, Json{{"text", "short"}});
    file.write(2, Json{{"text", "too long for what is left"}});
    return 0;
  });
  EXPECT_EQ(WEXITSTATUS(status), static_cast<int>(ExitCode::kRuntime));
  EXPECT_EQ(read_file(folder / "m"), "{\"step\":1,\"text\":\"short\"}\n");
}

}  // namespace
}  // namespace sluice
