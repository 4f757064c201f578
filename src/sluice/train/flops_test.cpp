// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/flops.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "sluice/models/family.h"

namespace sluice {
namespace {

Model preset(const std::string& name, const BuildOptions& options = {}) {
  for (const auto& family : families()) {
    if (family.presets.contains(name)) {
      return build_model(nlohmann::json::parse(family.presets.at(name)), name, options);
    }
  }
  return {};
}

// Two sequences, of 3 tokens and of 1: 4 tokens, 6 + 1 pairs of a query and a key that it sees. Two tokens are asked.
const PackedBatch kPack{.tokens = {1, 2, 3, 4},
                        .cu_seqlens = {0, 3, 4},
                        .targets = {2, 3, -100, -100},
                        .loss_weight = {1, 1, 0, 0},
                        .samples = {0, 1}};
const std::vector<std::int64_t> kLengths{3, 1};

// Counted on paper, from the sizes of the preset.
TEST(Flops, OfTheTinyModelAreThoseOfItsParts) {
  const auto model = preset("qwen3_5-tiny");
  const Operations expected{// 3 layers: q, k, v of 256 together, z of 128, b and a of 4 each, from 128; out 128 x 128
                            {"linear attention, projections", 4 * 3 * 2.0 * (128 * (256 + 128 + 8) + 128 * 128)},
                            {"linear attention, convolution", 4 * 3 * 2.0 * 256 * 4},
                            {"linear attention, gated delta rule", 4 * 3 * 6.0 * 4 * 32 * 32},
                            // 1 layer: queries and gates of 256, keys and values of 64 each; out 128 x 128
                            {"softmax attention, projections", 4 * 2.0 * (128 * (256 + 64 + 64) + 128 * 128)},
                            {"softmax attention, scores and values", 7 * 4.0 * 4 * 32},
                            {"feed-forward", 4 * 4 * 2.0 * 3 * 128 * 384},
                            {"head", 2 * 2.0 * 128 * 1024}};
  EXPECT_EQ(model.decoder->forward_operations(kLengths, 2), expected);
  EXPECT_EQ(training_operations({.decoder = *model.decoder}, std::vector{kPack, kPack}), 2 * 3 * total(expected));
}

TEST(Flops, OfThePublishedSmallestModelAreThoseOfItsParts) {
  const auto model = preset("qwen3_5-0.8b");
  const Operations expected{{"linear attention, projections", 4 * 378'667'008.0},
                            {"linear attention, convolution", 4 * 884'736.0},
                            {"linear attention, gated delta rule", 4 * 28'311'552.0},
                            {"softmax attention, projections", 4 * 88'080'384.0},
                            {"softmax attention, scores and values", 7 * 49'152.0},
                            {"feed-forward", 4 * 528'482'304.0},
                            {"head", 2 * 508'559'360.0}};
  EXPECT_EQ(model.decoder->forward_operations(kLengths, 2), expected);
}

// The mixers of the tiny dense model; a router, four of its experts and the shared one with its gate in each layer.
TEST(Flops, OfASparseModelCountTheExpertsThatATokenVisits) {
  const auto model = preset("qwen3_next-tiny", {.mtp = true});
  auto expected = preset("qwen3_5-tiny").decoder->forward_operations(kLengths, 2);
  expected["router"] = 4 * 4 * 2.0 * 128 * 16;
  expected["experts"] = 4 * 4 * 2.0 * 3 * 128 * 4 * 64;
  expected["feed-forward"] = 4 * 4 * 2.0 * (3 * 128 * 64 + 128);
  EXPECT_EQ(model.decoder->forward_operations(kLengths, 2), expected);

  // One more layer of softmax attention and experts behind a projection of 256 to 128; one token has a second
  // successor.
  const Operations block{{"multi-token prediction, projection", 4 * 2.0 * 256 * 128},
                         {"softmax attention, projections", expected["softmax attention, projections"]},
                         {"softmax attention, scores and values", expected["softmax attention, scores and values"]},
                         {"router", expected["router"] / 4},
                         {"experts", expected["experts"] / 4},
                         {"feed-forward", expected["feed-forward"] / 4}};
  EXPECT_EQ(model.mtp->forward_operations(kLengths), block);
  const auto of_block = 3 * (total(block) + 2.0 * 128 * 1024);
  Objective objective{.decoder = *model.decoder, .mtp = model.mtp.get()};
  EXPECT_EQ(training_operations(objective, std::vector{kPack}), 3 * total(expected) + of_block);
  objective.mtp_only = true;
  EXPECT_EQ(training_operations(objective, std::vector{kPack}), total(expected) + of_block);
}

TEST(Flops, APeakIsKnownOrNotGuessed) {
  EXPECT_EQ(peak_operations_per_s("NVIDIA H200", kBFloat16), 989e12);
  EXPECT_EQ(peak_operations_per_s("NVIDIA H200", kFloat), std::nullopt);
  EXPECT_EQ(peak_operations_per_s("NVIDIA H2000", kBFloat16), std::nullopt);
  EXPECT_EQ(peak_operations_per_s("", kBFloat16), std::nullopt);
}

}  // namespace
}  // namespace sluice
