// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_attention.h"

#include <gtest/gtest.h>

#include "sluice/layers/context_attention.h"
#include "sluice/layers/mesh_testing.h"

namespace sluice {
namespace {

LayerOnMesh gated_attention(bool sparse) {
  return {.make =
              [=] {
                constexpr double kEps = 1e-6, kRange = 0.5;
                auto indexer = sparse ? std::make_unique<BlockIndexer>(BlockIndexerSizes{.hidden_size = 12,
                                                                                         .num_heads = 2,
                                                                                         .head_dim = 8,
                                                                                         .block_size = 4,
                                                                                         .budget = 8,
                                                                                         .rotary_theta = 10000,
                                                                                         .rotary_dim = 4,
                                                                                         .rms_norm_eps = kEps,
                                                                                         .initializer_range = kRange})
                                      : nullptr;
                return std::make_unique<GatedAttention>(GatedAttentionSizes{.hidden_size = 12,
                                                                            .num_attention_heads = 4,
                                                                            .num_key_value_heads = 2,
                                                                            .head_dim = 8,
                                                                            .rms_norm_eps = kEps,
                                                                            .initializer_range = kRange},
                                                        std::move(indexer));
              },
          .forward =
              [](const Module& module, const Tensor& x, const ForwardContext& context) {
                return static_cast<const GatedAttention&>(module).forward(x, context, nullptr);
              },
          .width = 12,
          .rotary_dim = 4};
}

constexpr double kBound = 1e-12;  // float64: sums in another order

TEST(GatedAttention, ASequenceMayRunThroughSeveralContextRanks) {
  for (const std::int64_t cp : {2, 3, 4}) expect_same_on_mesh(gated_attention(false), {53}, {.cp = cp}, kBound);
}

TEST(GatedAttention, SequencesMayEndAnywhereInAPiece) {
  expect_same_on_mesh(gated_attention(false), {5, 30, 1, 9, 13}, {.cp = 2}, kBound);
  expect_same_on_mesh(gated_attention(false), {8, 8, 8, 8}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_attention(false), {5, 30, 1, 9, 13}, {.cp = 2, .tp = 2}, kBound);
}

TEST(GatedAttention, RanksMayHaveNoTokens) {
  expect_same_on_mesh(gated_attention(false), {2, 3}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_attention(false), {3}, {.cp = 4}, kBound);
}

TEST(GatedAttention, KeyValueHeadsAreHeldTwiceWhereThereAreFewerThanRanks) {
  expect_same_on_mesh(gated_attention(false), {5, 30}, {.tp = 4}, kBound);
}

TEST(GatedAttention, QueriesChooseTheSameBlocksOnContextRanks) {
  expect_same_on_mesh(gated_attention(true), {5, 40, 1, 9, 13}, {.cp = 2}, kBound);
  expect_same_on_mesh(gated_attention(true), {5, 40, 1, 9, 13}, {.cp = 4}, kBound);
  expect_same_on_mesh(gated_attention(true), {47}, {.cp = 3}, kBound);
  expect_same_on_mesh(gated_attention(true), {5, 7}, {.cp = 2}, kBound);  // all within the budget
  expect_same_on_mesh(gated_attention(true), {5, 40, 1, 9, 13}, {.cp = 2, .tp = 2}, kBound);
}

TEST(Zigzag, TwoRanksHoldTheOuterAndTheInnerChunks) {
  run_ranks(2, [](const World& world) {
    const Mesh mesh(world, {.cp = 2});
    const Zigzag zigzag({0, 8, 16}, mesh.cp());
    const auto x = at::arange(16, kLong).narrow(0, 8 * world.rank(), 8);
    const auto chunks = zigzag.to_chunks(x);
    EXPECT_TRUE(chunks.equal(world.rank() == 0 ? at::tensor({0, 1, 2, 3, 12, 13, 14, 15}, kLong)
                                               : at::tensor({4, 5, 6, 7, 8, 9, 10, 11}, kLong)));
    EXPECT_TRUE(zigzag.to_piece(chunks).equal(x));
  });
}

TEST(Zigzag, ThereAndBackIsTheIdentityForAnyLength) {
  for (const std::int64_t ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](const World& world) {
      const Mesh mesh(world, {.cp = ranks});
      for (const std::int64_t tokens : {1, 3, 16, 29}) {
        const auto first = piece_begin(tokens, ranks, world.rank()), end = piece_begin(tokens, ranks, world.rank() + 1);
        const auto x = at::arange(first, end, kLong);
        const Zigzag zigzag(piece_bounds(std::vector{tokens}, ranks, 1), mesh.cp());
        const auto chunks = zigzag.to_chunks(x);
        const auto early = zigzag.early(), late = zigzag.late();
        EXPECT_TRUE(chunks.equal(at::cat({at::arange(early.first, early.first + early.count, kLong),
                                          at::arange(late.first, late.first + late.count, kLong)})));
        EXPECT_TRUE(zigzag.to_piece(chunks).equal(x));
      }
    });
  }
}

}  // namespace
}  // namespace sluice
