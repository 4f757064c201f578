// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_delta_net.h"

#include <gtest/gtest.h>

#include "sluice/layers/gated_delta_core.h"
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

// Context ranks' pieces begin where chunks of the recurrence do, so the state that the second rank begins with is the
// one that was there without the cut, and its chunks are the same. What looks at each token alone rounds as before.
TEST(GatedDeltaCore, TwoContextRanksGiveTheBitsOfOne) {
  const GatedDeltaCoreSizes sizes{.num_key_heads = 2,
                                  .num_value_heads = 4,
                                  .key_head_dim = 16,
                                  .value_head_dim = 8,
                                  .rms_norm_eps = 1e-6,
                                  .output_gate = GateActivation::kSilu};
  const std::int64_t channels = 2 * 2 * 16 + 4 * 8;
  for (const auto& lengths : std::vector<std::vector<std::int64_t>>{{600}, {100, 1, 499}, {280, 1, 300, 19}}) {
    const auto pack = make_pack(lengths);
    const auto draw = [](at::IntArrayRef shape, std::uint64_t seed) {
      return at::randn(shape, mesh_testing::generator(seed));
    };
    const auto projection = draw({pack.positions.numel(), channels + 40}, 1);  // and z [4, 8], b [4], a [4]
    const auto conv = draw({channels, 1, 4}, 2), A_log = draw({4}, 3), dt_bias = draw({4}, 4), norm = draw({8}, 5);
    const auto core = [&](const Mesh& mesh) {
      const auto split = split_tokens(lengths, mesh);
      const auto own = projection.narrow(0, split.first, split.count);
      return gated_delta_core(own, {conv, A_log, dt_bias, norm}, pack, mesh.cp(), sizes);
    };
    const auto want = core(one_process());
    run_ranks(2, [&](const World& world) {
      const Mesh mesh(world, {.cp = 2});
      const auto split = split_tokens(lengths, mesh);
      EXPECT_TRUE(core(mesh).equal(want.narrow(0, split.first, split.count)))
          << "rank " << world.rank() << ", sequences " << c10::str(at::IntArrayRef(lengths));
    });
  }
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

// Long enough for exchanges of tokens beside the products.
TEST(GatedDeltaNet, HeadsOfALongPackAreSplitOverTensorRanks) {
  expect_same_on_mesh(gated_delta_net(), {8100, 1, 200}, {.tp = 2}, kBound);
}

TEST(GatedDeltaNet, HeadsAreSplitOverTensorRanks) {
  expect_same_on_mesh(gated_delta_net(), {5, 30, 1, 9}, {.tp = 2}, kBound);
  expect_same_on_mesh(gated_delta_net(), {5, 30, 1, 9}, {.cp = 2, .tp = 2}, kBound);
}

}  // namespace
}  // namespace sluice
