// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/per_layer_embedding.h"

#include <gtest/gtest.h>

#include "sluice/layers/mesh_testing.h"

namespace sluice {
namespace {

LayerOnMesh per_layer_embedding() {
  return {.make =
              [] {
                return std::make_unique<PerLayerEmbedding>(PerLayerEmbeddingSizes{.hidden_size = 6,
                                                                                  .streams = 2,
                                                                                  .embedding_size = 8,
                                                                                  .conv_kernel_dim = 4,
                                                                                  .hash = {.vocab_size = 20,
                                                                                           .ngram_size = 3,
                                                                                           .heads_per_ngram = 2,
                                                                                           .vocab_size_base = 50,
                                                                                           .divisible_by = 8,
                                                                                           .seed = 1234,
                                                                                           .index = 0,
                                                                                           .eos_token_id = 7},
                                                                                  .rms_norm_eps = 1e-6,
                                                                                  .initializer_range = 0.5});
              },
          .forward =
              [](const Module& module, const Tensor& x, const ForwardContext& context) {
                return static_cast<const PerLayerEmbedding&>(module).forward(x, context, nullptr);
              },
          .width = 12,
          .vocab_size = 20};
}

constexpr double kBound = 1e-12;  // float64; the gate's slope, up to 125, is in both

TEST(PerLayerEmbedding, NgramsAndConvolutionLookBackOverRanks) {
  for (const auto& sizes : std::vector<MeshSizes>{{.cp = 2}, {.tp = 2}, {.cp = 3}, {.cp = 2, .tp = 2}}) {
    expect_same_on_mesh(per_layer_embedding(), {50}, sizes, kBound);
    expect_same_on_mesh(per_layer_embedding(), {5, 30, 1, 9}, sizes, kBound);
    expect_same_on_mesh(per_layer_embedding(), {8, 8, 8, 8}, sizes, kBound);
  }
}

TEST(PerLayerEmbedding, PiecesMayBeShorterThanTheConvolutionReachesOrEmpty) {
  expect_same_on_mesh(per_layer_embedding(), {13}, {.cp = 4}, kBound);
  expect_same_on_mesh(per_layer_embedding(), {2, 3}, {.cp = 4}, kBound);
  expect_same_on_mesh(per_layer_embedding(), {3}, {.cp = 2, .tp = 2}, kBound);
}

TEST(PerLayerEmbedding, RanksReadPartsOfTheTableForEachOther) {
  for (const auto& sizes :
       std::vector<MeshSizes>{{.cp = 2, .ep = 2}, {.cp = 4, .ep = 2}, {.cp = 2, .tp = 2, .ep = 2}}) {
    expect_same_on_mesh(per_layer_embedding(), {5, 30, 1, 9}, sizes, kBound);
    expect_same_on_mesh(per_layer_embedding(), {1}, sizes, kBound);  // ranks without a token read for the others
  }
}

}  // namespace
}  // namespace sluice
