// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <fstream>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

OpenRun open_new(const fs::path& out) {
  return open_run({.out = out}, {}, {.settings = nlohmann::json::object(), .samples = "a"}, "seed = 1\n");
}

TEST(RunFolder, IsOneRunsAlone) {
  const TemporaryFolder folder;
  const auto out = folder / "run";
  {
    const auto first = open_new(out);
    const auto refusal = error_of([&] { open_new(out); }, ExitCode::kUsage);
    EXPECT_THAT(refusal, HasSubstr(out.string()));
    EXPECT_THAT(refusal, HasSubstr(fmt::format("another run writes there (process {} on ", ::getpid())));
  }
  // It ended, so what refuses now is what it left.
  EXPECT_THAT(error_of([&] { open_new(out); }, ExitCode::kUsage), HasSubstr("--ckpt.resume auto"));
  const auto next =
      open_run({.out = out}, {.resume = Resume::kAuto}, {.settings = nlohmann::json::object(), .samples = "a"}, "");
  EXPECT_FALSE(next.state);
}

TEST(RunFolder, IsFreeWhenItsProcessWasKilled) {
  const TemporaryFolder folder;
  const int status = run_in_child([&] {
    const RunLock lock(folder.path());
    ::raise(SIGKILL);
    return 0;
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(error_of([&] { RunLock(folder.path()); }, ExitCode::kUsage), "no error");
}

TEST(RunFolder, ALockLeftBehindIsNoRun) {
  const TemporaryFolder folder;
  std::ofstream(folder / ".lock") << "process 1 on elsewhere";
  EXPECT_EQ(error_of([&] { check_run_folder({.out = folder.path()}, {}); }, ExitCode::kUsage), "no error");
  EXPECT_TRUE(open_new(folder.path()).lock);
}

}  // namespace
}  // namespace sluice
