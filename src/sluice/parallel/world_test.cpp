// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "sluice/core/testing.h"
#include "sluice/parallel/collectives.h"
#include "sluice/parallel/mesh.h"
#include "sluice/parallel/testing.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

TEST(World, EveryRankEndsWithTheSameErrorWhereOneHasOtherSettings) {
  std::array<std::string, 3> messages;
  run_ranks(3, [&](const World& world) {
    messages[world.rank()] = error_of(
        [&] {
          world.agree({{"program", "1"}, {"optim.lr", world.rank() == 2 ? "2e-5" : "1e-5"}});
        },
        ExitCode::kUsage);
  });
  for (const auto& message : messages) EXPECT_THAT(message, HasSubstr("rank 2 has optim.lr: 2e-5 against 1e-5"));
}

TEST(World, RanksWithTheSameSettingsAgree) {
  run_ranks(3, [](const World& world) { world.agree({{"program", "1"}, {"optim.lr", "1e-5"}}); });
}

TEST(World, AMissingRankIsNamed) {
  const auto port = free_port();
  const auto message =
      error_of([&] { World({.rank = 0, .size = 3, .address = "127.0.0.1", .port = port}, 300ms); }, ExitCode::kRuntime);
  EXPECT_THAT(message, HasSubstr("these did not start within 0.3 s (parallel.timeout): rank 1, 2"));
}

TEST(World, ARankWithoutRankZeroSaysWhereItLooked) {
  const auto port = free_port();
  const auto message =
      error_of([&] { World({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port}, 300ms); }, ExitCode::kRuntime);
  EXPECT_THAT(message, HasSubstr(fmt::format("rank 1 found nobody at 127.0.0.1:{}", port)));
}

// What each rank of a world says after `failing` made rank 2 leave without its part in an exchange.
std::array<std::string, 3> messages_when(const std::function<void(const World&)>& failing) {
  std::array<std::string, 3> messages;
  run_ranks(
      3,
      [&](const World& world) {
        const Mesh mesh(world, {.dp = 3});
        barrier(mesh.world());
        if (world.rank() == 2) return failing(world);
        messages[world.rank()] = error_of(
            [&] {
              for (int i = 0; i < 2; ++i) all_reduce_sum(at::ones({4}), mesh.world());
            },
            ExitCode::kRuntime);
      },
      6s);  // a busy machine needs seconds to connect
  return messages;
}

TEST(World, AFailureIsToldToTheOthersWhoReferToIt) {
  const auto messages = messages_when([](const World& world) { world.note_failure("disk full\n  Make room."); });
  EXPECT_THAT(messages[0], HasSubstr("stopped after rank 2: disk full"));
  EXPECT_THAT(messages[1], HasSubstr("stopped after rank 2: disk full"));
}

TEST(World, ARankThatVanishesEndsTheOthersAndIsNamedOnce) {
  const auto messages = messages_when([](const World&) {});
  const auto names_it = [](const std::string& message) { return message.find("No word from rank 2") != message.npos; };
  EXPECT_TRUE(names_it(messages[0]) || names_it(messages[1])) << messages[0] << messages[1];
}

TEST(World, ARankThatHangsEndsTheOthersAfterTheTimeout) {
  const auto messages = messages_when([](const World&) { std::this_thread::sleep_for(9s); });
  const auto names_it = [](const std::string& message) { return message.find("No word from rank 2") != message.npos; };
  EXPECT_TRUE(names_it(messages[0]) || names_it(messages[1])) << messages[0] << messages[1];
}

}  // namespace
}  // namespace sluice
