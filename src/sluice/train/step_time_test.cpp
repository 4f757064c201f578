// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step_time.h"

#include <gtest/gtest.h>

#include "sluice/models/testing.h"
#include "sluice/train/flops.h"

namespace sluice {
namespace {

StepTime estimate(const std::string& preset, const MeshSizes& sizes, PlannedRun run) {
  const auto model = build_model(tiny_configs().at(preset), preset, {});
  const Mesh mesh(sizes, /*rank=*/0);
  const PlannedRun on_mesh{.dtype = kBFloat16,
                           .seq_len = run.seq_len,
                           .tokens_per_step = run.tokens_per_step,
                           .gradients = run.gradients,
                           .offload = run.offload,
                           .recompute = run.recompute,
                           .mesh = mesh};
  return estimate_step(model, on_mesh);
}

const PlannedRun kRows{.dtype = kBFloat16, .seq_len = 1024, .tokens_per_step = 8192};

TEST(StepTime, OfOneGpuIsItsOperationsAndItsMemory) {
  const auto model = build_model(tiny_configs().at("qwen3_5-tiny"), "tiny", {});
  const auto time = estimate("qwen3_5-tiny", {}, kRows);
  const std::vector row{full_row(1024)};
  EXPECT_DOUBLE_EQ(time.products, 8 * training_operations({.decoder = *model.decoder}, row) / rates::kProducts);
  EXPECT_GT(time.memory, time.products);  // so narrow a model
  EXPECT_EQ(time.exchanges, 0);
  EXPECT_EQ(time.gradients, 0);
  // Two states and a master in float32 read and written, the gradient read twice, the parameter written.
  const auto parameters = static_cast<double>(count_elements(model.parameters()));
  EXPECT_NEAR(time.optimizer, parameters * (24 + 8 + 2) / rates::kMemory, 1e-3 * time.optimizer);
}

TEST(StepTime, RanksShareTheWorkAndWaitForEachOther) {
  const auto one = estimate("qwen3_5-tiny", {}, kRows);
  for (const auto& sizes : std::vector<MeshSizes>{{.dp = 2}, {.tp = 2}, {.cp = 2}}) {
    const auto two = estimate("qwen3_5-tiny", sizes, kRows);
    EXPECT_DOUBLE_EQ(two.products, one.products / 2);
    EXPECT_NEAR(two.optimizer, one.optimizer / 2, 0.01 * one.optimizer);
    EXPECT_GT(two.exchanges, 0);
  }
  // Eight rows of one GPU are one of each of eight, whose layers exchange nothing.
  const auto eight = estimate("qwen3_5-tiny", {.dp = 8}, kRows);
  const auto model = build_model(tiny_configs().at("qwen3_5-tiny"), "tiny", {});
  const auto gradients = 4 * static_cast<double>(count_elements(model.parameters()));  // are joined and given out
  EXPECT_GT(eight.memory, one.memory / 8);
  EXPECT_LT(eight.memory, one.memory / 8 + 3 * 2 * gradients / rates::kMemory);
  EXPECT_LT(eight.exchanges, estimate("qwen3_5-tiny", {.tp = 2}, kRows).exchanges);
}

TEST(StepTime, ExchangesBetweenMachinesTakeLonger) {
  const PlannedRun run{.dtype = kBFloat16, .seq_len = 1024, .tokens_per_step = 16384};
  EXPECT_GT(estimate("qwen3_5-tiny", {.dp = 16}, run).exchanges, estimate("qwen3_5-tiny", {.dp = 8}, run).exchanges);
}

TEST(StepTime, ExpertsExchangeTokens) {
  EXPECT_GT(estimate("qwen3_5_moe-tiny", {.dp = 4, .ep = 4}, kRows).exchanges,
            estimate("qwen3_5_moe-tiny", {.dp = 4}, kRows).exchanges);
}

TEST(StepTime, ComputingAgainAndStatesElsewhereTakeTheirTime) {
  const auto plain = estimate("qwen3_5-tiny", {}, kRows);
  EXPECT_GT(
      estimate("qwen3_5-tiny", {}, {.dtype = kBFloat16, .seq_len = 1024, .tokens_per_step = 8192, .recompute = true})
          .products,
      1.2 * plain.products);
  EXPECT_GT(estimate("qwen3_5-tiny", {},
                     {.dtype = kBFloat16, .seq_len = 1024, .tokens_per_step = 8192, .offload = Offload::kHost})
                .optimizer,
            10 * plain.optimizer);
}

}  // namespace
}  // namespace sluice
