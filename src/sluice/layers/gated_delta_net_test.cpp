// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_delta_net.h"

#include <gtest/gtest.h>

#include "sluice/layers/mesh_testing.h"

namespace sluice {
namespace {

LayerOnMesh gated_delta_net(std::int64_t kernel = 4) {
  return {.make =
              [=] {
                return std::make_unique<GatedDeltaNet>(GatedDeltaNetSizes{.hidden_size = 12,
                                                                          .num_key_heads = 2,
                                                                          .num_value_heads = 4,
                                                                          .key_head_dim = 8,
                                                                          .value_head_dim = 6,
                                                                          .conv_kernel_dim = kernel,
                                                                          .rms_norm_eps = 1e-6,
                                                                          .initializer_range = 0.5});
              },
          .forward =
              [](const Module& module, const Tensor& x, const ForwardContext& context) {
                return static_cast<const GatedDeltaNet&>(module).forward(x, context, nullptr);
              },
          .width = 12};
}

// In float64, where a state that goes from rank to rank as A S + B is rounded some 10 times more than one that stays.
constexpr double kBound = 1e-12;

TEST(GatedDeltaNet, ASequenceMayRunThroughSeveralContextRanks) {
  for (const std::int64_t cp : {2, 3, 4}) expect_same_on_mesh(gated_delta_net(), {70}, {.cp = cp}, kBound);
}

TEST(GatedDeltaNet, SequencesMayEndAnywhereInAPiece) {
  expect_same_on_mesh(gated_delta_net(), {5, 30, 1, 9, 13}, {.cp = 2}, kBound);
  expect_same_on_mesh(gated_delta_net(), {5, 30, 1, 9, 13}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_delta_net(), {8, 8, 8, 8}, {.cp = 4}, kBound);  // at the pieces' ends
}

TEST(GatedDeltaNet, PiecesMayBeShorterThanTheConvolutionOrEmpty) {
  expect_same_on_mesh(gated_delta_net(), {8}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_delta_net(), {2, 3}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_delta_net(), {3}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_delta_net(/*kernel=*/1), {9}, {.cp = 2}, kBound);
}

TEST(GatedDeltaNet, HeadsAreSplitOverTensorRanks) {
  expect_same_on_mesh(gated_delta_net(), {5, 30, 1, 9}, {.tp = 2}, kBound);
  expect_same_on_mesh(gated_delta_net(), {5, 30, 1, 9}, {.cp = 2, .tp = 2}, kBound);
}

}  // namespace
}  // namespace sluice
