// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/mesh.h"

#include <gtest/gtest.h>

#include "sluice/core/testing.h"
#include "sluice/parallel/collectives.h"
#include "sluice/parallel/testing.h"

namespace sluice {
namespace {

using Ranks = std::vector<std::int64_t>;

// The ranks of the world that are in a group, in its order.
Ranks members(const Group& group, const World& world) {
  Ranks ranks;
  for (const auto& numbers : all_gather_numbers({world.rank()}, group)) ranks.push_back(numbers[0]);
  return ranks;
}

TEST(Mesh, OneProcessIsAMeshWhoseGroupsAreOfItself) {
  for (const auto* group : {&one_process().world(), &one_process().tp(), &one_process().holders(1, 1)}) {
    EXPECT_EQ(group->size(), 1);
    EXPECT_EQ(group->rank(), 0);
  }
}

TEST(Mesh, TensorRanksLieClosestThenContextThenData) {
  run_ranks(8, [](const World& world) {
    const Mesh mesh(world, {.dp = 2, .cp = 2, .tp = 2, .ep = 2});
    std::vector<Ranks> found;
    for (const auto* group : {&mesh.world(), &mesh.tp(), &mesh.cp(), &mesh.sequence(), &mesh.data(), &mesh.ep(),
                              &mesh.expert_data(), &mesh.holders(1, 1), &mesh.holders(2, 1), &mesh.holders(1, 2)}) {
      found.push_back(members(*group, world));
    }
    if (world.rank() != 5) return;  // d = 1, c = 0, t = 1
    EXPECT_EQ(found, (std::vector<Ranks>{{0, 1, 2, 3, 4, 5, 6, 7},
                                         {4, 5},
                                         {5, 7},
                                         {4, 5, 6, 7},
                                         {1, 3, 5, 7},
                                         {5, 7},
                                         {1, 5},
                                         {0, 1, 2, 3, 4, 5, 6, 7},
                                         {1, 3, 5, 7},     // cut over the tensor ranks
                                         {0, 1, 4, 5}}));  // an expert, the same on each tensor rank
  });
}

TEST(Mesh, RefusesSizesThatDoNotFitTheProcesses) {
  const World alone;
  EXPECT_NE(error_of([&] { Mesh(alone, {.tp = 2}); }, ExitCode::kUsage).find("2 processes, and 1 run"),
            std::string::npos);
  EXPECT_NE(error_of([&] { Mesh(alone, {.ep = 2}); }, ExitCode::kUsage).find("does not divide"), std::string::npos);
}

}  // namespace
}  // namespace sluice
