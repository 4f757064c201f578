// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/launch.h"

#include <gtest/gtest.h>

#include <map>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

Launch launched_with(const std::map<std::string, std::string>& variables) {
  return read_launch([&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(Launch, WithoutAStarterAProcessIsAlone) {
  EXPECT_EQ(launched_with({}).size, 1);
  EXPECT_EQ(launched_with({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).size, 1);  // a batch script
}

TEST(Launch, ReadsTorchrun) {
  const auto launch = launched_with({{"RANK", "5"},
                                     {"WORLD_SIZE", "8"},
                                     {"LOCAL_RANK", "1"},
                                     {"MASTER_ADDR", "node1"},
                                     {"MASTER_PORT", "1234"},
                                     {"SLURM_PROCID", "1"},
                                     {"SLURM_STEP_NUM_TASKS", "2"}});
  EXPECT_EQ(launch.starter, "torchrun");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "node1");
  EXPECT_EQ(launch.port, 1234);
  EXPECT_FALSE(launch.has_store);
}

TEST(Launch, ReadsOpenMpiWhoseProcessesMeetOnTheirOnlyMachine) {
  const auto launch = launched_with({{"OMPI_COMM_WORLD_RANK", "1"},
                                     {"OMPI_COMM_WORLD_SIZE", "2"},
                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.address, "127.0.0.1");
}

TEST(Launch, ReadsSlurmWhoseProcessesMeetOnTheFirstMachine) {
  const auto launch = launched_with({{"SLURM_PROCID", "3"},
                                     {"SLURM_STEP_NUM_TASKS", "4"},
                                     {"SLURM_LOCALID", "1"},
                                     {"SLURM_JOB_NODELIST", "gpu[017-018]"}});
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "gpu017");
}

TEST(Launch, FindsTheFirstMachineOfANodeList) {
  EXPECT_EQ(first_host("node003"), "node003");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("a,b[1-2]"), "a");
  EXPECT_EQ(first_host("b[7,9-11],c"), "b7");
}

TEST(Launch, RefusesHalfASetting) {
  const auto message = [](const std::map<std::string, std::string>& variables) {
    return error_of([&] { launched_with(variables); }, ExitCode::kUsage);
  };
  EXPECT_NE(message({{"RANK", "0"}}).find("WORLD_SIZE is not set"), std::string::npos);
  EXPECT_NE(message({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("count from 0"), std::string::npos);
  EXPECT_NE(message({{"RANK", "x"}, {"WORLD_SIZE", "2"}}).find("RANK must be a number"), std::string::npos);
  EXPECT_NE(message({{"RANK", "1"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR"), std::string::npos);
}

}  // namespace
}  // namespace sluice
