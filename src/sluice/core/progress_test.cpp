// SPDX-License-Identifier: Apache-2.0
// The lines that people see, in a file and on a terminal.
#include "sluice/core/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <thread>

#include "sluice/core/log.h"
#include "sluice/core/terminal.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

StepLine full_line() {
  return {.step = 12,
          .steps = 500,
          .loss = 1.23449,
          .grad_norm = 0.8301,
          .lr = 9.6e-6,
          .tokens_per_s = 48'123,
          .mfu = 0.4123,
          .memory_bytes = 61.3 * kGiB,
          .step_s = 1.36,
          .eta_s = 665.2};
}

TEST(StepLine, ShowsWhatIsKnown) {
  EXPECT_EQ(format_step_line(full_line()),
            "step 12/500 | loss 1.2345 | gnorm 0.83 | lr 9.6e-06 | 48.1k tok/s | mfu 41.2% | 61.3 GiB | 1.36 s | eta "
            "0:11:05");
  EXPECT_EQ(format_step_line({.step = 1, .steps = 2, .loss = 3, .further = {"reward 0.53"}, .lr = 1e-5}),
            "step 1/2 | loss 3.0000 | reward 0.53 | lr 1.0e-05");
}

TEST(StepLine, FitsIntoOneHundredAndTwentyColumns) {
  auto line = full_line();
  line.step = line.steps = 100'000;
  line.loss = 12.5;
  line.grad_norm = 123.456;
  line.tokens_per_s = 999e3;
  line.mfu = 0.05;
  line.memory_bytes = 141 * kGiB;
  line.step_s = 99.99;
  line.eta_s = 99 * 3600;
  EXPECT_LE(format_step_line(line).size(), 120);
}

TEST(StepLine, ShortensLargeNumbers) {
  const auto speed = [](double tokens) { return format_step_line({.tokens_per_s = tokens}); };
  EXPECT_THAT(speed(0), HasSubstr("| 0 tok/s"));
  EXPECT_THAT(speed(999.4), HasSubstr("| 999 tok/s"));
  EXPECT_THAT(speed(999.6), HasSubstr("| 1.00k tok/s"));
  EXPECT_THAT(speed(999'960), HasSubstr("| 1.00M tok/s"));
  EXPECT_THAT(format_step_line({.eta_s = 100 * 3600 + 61}), HasSubstr("eta 100:01:01"));
  EXPECT_THAT(format_step_line({.eta_s = -1}), HasSubstr("eta 0:00:00"));
}

// What `action` writes to standard error when that is a file.
std::string in_a_file(const std::function<void()>& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Progress, IsOnePlainLineAStepInAFile) {
  const auto text = in_a_file([] {
    Progress progress;
    for (int step = 1; step <= 3; ++step) progress.step({.step = step, .steps = 3});
  });
  EXPECT_EQ(text, "step 1/3\nstep 2/3\nstep 3/3\n");
}

TEST(Progress, OfOtherWorkDoesNotFillAFile) {
  const auto text = in_a_file([] {
    Progress progress;
    for (int shard = 1; shard <= 1000; ++shard) progress.update("loading");
  });
  EXPECT_EQ(text, "loading\n");
}

TEST(Progress, IsSilentWhenQuiet) {
  const auto text = in_a_file([] {
    set_log_level(LogLevel::kWarning);
    Progress progress;
    progress.step({.step = 1, .steps = 1});
    progress.update("loading");
    log_info("a line");
    log_warning("a problem");
    set_log_level(LogLevel::kInfo);
  });
  EXPECT_EQ(text, "warning: a problem\n");
}

// What `action` writes when standard error is a terminal of `columns` columns. Runs in a child process.
std::string on_a_terminal(unsigned short columns, const std::function<void()>& action) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || ::grantpt(terminal) != 0 || ::unlockpt(terminal) != 0) return "";
  const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  const int side = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
  ::ioctl(side, TIOCSWINSZ, &size);
  run_in_child([&] {
    ::setenv("TERM", "xterm", 1);
    ::dup2(side, STDERR_FILENO);
    action();
    return 0;
  });
  ::close(side);
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t count = 0; (count = ::read(terminal, part.data(), part.size())) > 0;) text.append(part.data(), count);
  ::close(terminal);
  return text;
}

class Terminal : public ::testing::Test {
 protected:
  void SetUp() override {
    if (on_a_terminal(80, [] { log_info("x"); }).empty()) GTEST_SKIP() << "no pseudo terminal here";
  }
};

TEST_F(Terminal, RedrawsOneLineInPlaceAndLeavesTheLastOne) {
  const auto text = on_a_terminal(80, [] {
    Progress progress;
    progress.step({.step = 1, .steps = 3});
    progress.step({.step = 2, .steps = 3});  // too soon after the first for an eye
    progress.step({.step = 3, .steps = 3});
  });
  EXPECT_EQ(text, "\rstep 1/3\x1b[K\rstep 3/3\x1b[K\r\n");  // the terminal itself turns \n into \r\n
}

TEST_F(Terminal, CutsTheLineToItsWidth) {
  const auto text = on_a_terminal(12, [] {
    Progress progress;
    progress.update("loading öööööööö");
  });
  EXPECT_EQ(text, "\rloading ööö\x1b[K\r\n");
}

TEST_F(Terminal, WritesLogLinesAboveTheLiveLine) {
  const auto text = on_a_terminal(80, [] {
    ::setenv("NO_COLOR", "1", 1);
    Progress progress;
    progress.update("loading");
    log_info("found 3 shards");
  });
  EXPECT_EQ(text, "\rloading\x1b[K\r\x1b[Kfound 3 shards\r\n\rloading\x1b[K\r\n");
}

TEST_F(Terminal, ColoursWarningsUnlessNoColorIsSet) {
  const auto warn = [](const char* no_color) {
    return on_a_terminal(80, [=] {
      no_color != nullptr ? ::setenv("NO_COLOR", no_color, 1) : ::unsetenv("NO_COLOR");
      log_warning("hot");
    });
  };
  EXPECT_THAT(warn(nullptr), HasSubstr("\x1b["));
  EXPECT_THAT(warn(""), HasSubstr("\x1b["));
  EXPECT_EQ(warn("1"), "warning: hot\r\n");
}

}  // namespace
}  // namespace sluice
