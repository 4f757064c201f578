// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/log.h"

#include <gtest/gtest.h>

#include "sluice/core/error.h"

namespace sluice {
namespace {

TEST(Log, SaysARepeatedWarningOnce) {
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) log_once("slow path: {}", "no device");
  log_once("slow path: {}", "other reason");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "warning: slow path: no device\nwarning: slow path: other reason\n");
}

TEST(Log, PrintsBracesOfAReadyLineAsTheyAre) {
  ::testing::internal::CaptureStderr();
  log_line(LogLevel::kInfo, "a {b} c");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "a {b} c\n");
}

TEST(Errors, CarryTheirExitCodeAndWords) {
  const auto code_and_words = [](auto action) -> std::pair<ExitCode, std::string> {
    try {
      action();
    } catch (const Error& error) {
      return {error.code(), error.what()};
    }
    return {ExitCode::kDone, ""};
  };
  using Pair = std::pair<ExitCode, std::string>;
  EXPECT_EQ(code_and_words([] { fail_usage("{}: no", 1); }), (Pair{ExitCode::kUsage, "1: no"}));
  EXPECT_EQ(code_and_words([] { fail_data("bad {}", "row"); }), (Pair{ExitCode::kData, "bad row"}));
  EXPECT_EQ(code_and_words([] { SLUICE_CHECK(1 == 2, "q has {} heads", 3); }),
            (Pair{ExitCode::kRuntime, "q has 3 heads"}));
  EXPECT_EQ(code_and_words([] { SLUICE_CHECK(1 == 1, "never"); }), (Pair{ExitCode::kDone, ""}));
}

}  // namespace
}  // namespace sluice
