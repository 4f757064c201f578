// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/signals.h"

#include <gtest/gtest.h>

#include <csignal>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

TEST(StopSignals, AskForAStop) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const StopSignals stop;
    EXPECT_FALSE(stop.requested());
    ::raise(signal);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), signal);
  }
}

TEST(StopSignals, EndTheProcessAtOnceTheSecondTime) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const int status = run_in_child([&] {
      const StopSignals stop;
      ::raise(signal);
      ::raise(signal);
      return 0;
    });
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), signal == SIGINT ? 130 : 143);
  }
}

TEST(StopSignals, TakeWhatALauncherPassesOnAsTheSameRequest) {
  const StopSignals stop;
  ::raise(SIGINT);
  ::raise(SIGTERM);
  EXPECT_EQ(stop.signal(), SIGINT);
}

TEST(StopSignals, LeaveShortCommandsToTheSystem) {
  const int status = run_in_child([] {
    { const StopSignals stop; }
    ::raise(SIGTERM);
    return 0;
  });
  EXPECT_TRUE(WIFSIGNALED(status));
}

}  // namespace
}  // namespace sluice
