// SPDX-License-Identifier: Apache-2.0
// Training over the ranks of a mesh is training as one process: losses, the gradient of every parameter, its norm.
#include <gtest/gtest.h>

#include <map>

#include "sluice/checkpoint/whole_values.h"
#include "sluice/models/testing.h"
#include "sluice/parallel/testing.h"
#include "sluice/train/setup.h"
#include "sluice/train/step.h"
#include "sluice/train/testing.h"

namespace sluice {
namespace {

using Values = std::map<std::string, Tensor>;

Tensor drawn(at::IntArrayRef shape, double deviation) { return at::randn(shape) * deviation; }

// Whole values, every one away from what it is first drawn as, so that no gradient is hidden.
Values random_values(const nlohmann::json& config) {
  const auto model = build_model(config, "config", {.mtp = true});
  initialize(model.parameters(), kFloat, 1);
  at::manual_seed(2);
  Values values;
  for (const auto* parameter : model.parameters()) {
    auto value = parameter->value.clone();
    if (!parameter->frozen && parameter->shape.size() == 1) value += drawn(value.sizes(), 0.2);
    if (!parameter->frozen && parameter->shape.size() > 1) value = value * 3 + drawn(value.sizes(), 0.01);
    values[parameter->name] = value;
  }
  return values;
}

// What a step gives before its update; gradients on rank 0 alone.
struct Outcome {
  LossStats losses;
  double norm = 0;
  Values gradients;
};

Outcome outcome(const nlohmann::json& config, const Values& values, const std::vector<PackedBatch>& packs,
                const Mesh& mesh, Recompute recompute = Recompute::kNone) {
  auto model = build_model(config, "config", {.mtp = true});
  const auto parameters = model.parameters();
  for (auto* parameter : parameters) {
    parameter->value = take_piece(values.at(parameter->name), *parameter, place_of(mesh)).clone();
  }
  model.decoder->set_mesh(mesh);
  model.decoder->set_recompute(recompute);
  const auto trained = prepare(trained_parameters(model, MtpTraining::kJoint), {});
  const Objective objective{
      .decoder = *model.decoder, .router_aux_loss_coef = 0.05, .mtp = model.mtp.get(), .mtp_loss_scale = 0.3};
  Outcome found;
  found.losses = evaluate(objective, packs);
  GradientSum gradients(trained, mesh);
  add_gradients(objective, packs, gradients);
  found.norm = gradients.norm().item<double>();
  // The gradients take the places of the values, and are gathered as those are.
  const Shards shards(trained, mesh);
  for (std::size_t i = 0; i < trained.size(); ++i) {
    const auto own = shards.own_rows(i, trained[i]->value.detach());
    if (gradients.of(i).defined()) own.copy_(gradients.of(i).view_as(own));
    else own.zero_();
  }
  shards.publish();
  WholeValues whole(mesh);
  for (const auto* parameter : trained) {
    const auto gradient = whole.of(*parameter);
    if (gradient.defined()) found.gradients[parameter->name] = gradient.clone();
  }
  return found;
}

void expect_equal(const Outcome& got, const Outcome& want) {
  EXPECT_NEAR(got.losses.loss, want.losses.loss, kOtherOrder * want.losses.loss);
  EXPECT_NEAR(got.losses.mtp_loss, want.losses.mtp_loss, kOtherOrder * want.losses.mtp_loss);
  EXPECT_NEAR(got.losses.router_aux_loss, want.losses.router_aux_loss, kOtherOrder * want.losses.router_aux_loss);
  EXPECT_EQ(got.losses.accuracy, want.losses.accuracy);
  EXPECT_EQ(got.losses.tokens, want.losses.tokens);
  EXPECT_EQ(got.losses.trained_tokens, want.losses.trained_tokens);
  EXPECT_NEAR(got.norm, want.norm, kOtherOrder * want.norm);
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    EXPECT_LT(relative(got.gradients.at(name), gradient), kOtherOrder) << name;
  }
}

struct Layout {
  MeshSizes sizes;
  std::string name() const { return fmt::format("dp {} cp {} tp {} ep {}", sizes.dp, sizes.cp, sizes.tp, sizes.ep); }
};

void expect_layouts_equal(const std::string& preset, const std::vector<PackedBatch>& packs,
                          const std::vector<Layout>& layouts, Recompute recompute = Recompute::kNone,
                          const nlohmann::json& changes = nlohmann::json::object()) {
  auto config = tiny_configs().at(preset);
  config.update(changes);
  const auto values = random_values(config);
  const auto want = outcome(config, values, packs, one_process(), recompute);
  for (const auto& layout : layouts) {
    SCOPED_TRACE(preset + ", " + layout.name());
    Outcome got;
    run_ranks(layout.sizes.ranks(), [&](const World& world) {
      const Mesh mesh(world, layout.sizes);
      auto found = outcome(config, values, packs, mesh, recompute);
      if (world.rank() == 0) got = std::move(found);
    });
    expect_equal(got, want);
  }
}

const std::vector<PackedBatch>& packs() {
  static const std::vector<PackedBatch> list{random_pack({5, 1, 37, 2}, 3), random_pack({64, 31}, 4),
                                             random_pack({3}, 5)};
  return list;
}

TEST(TrainingOnAMesh, EqualsOneProcessForEveryFamily) {
  const std::vector<Layout> layouts{
      {{.tp = 2}}, {{.dp = 2}}, {{.cp = 2}}, {{.dp = 2, .cp = 2, .ep = 4}}, {{.cp = 2, .tp = 2, .ep = 2}}};
  for (const auto& [preset, config] : tiny_configs()) expect_layouts_equal(preset, packs(), layouts);
}

// Two key-value heads over four ranks, each held by two; a vocabulary and a width that four does not divide; rows of
// fewer tokens than ranks.
TEST(TrainingOnAMesh, EqualsOneProcessWithMoreRanksThanKeyValueHeads) {
  const std::vector<PackedBatch> short_packs{random_pack({2}, 6), random_pack({1, 1, 1}, 7), random_pack({17}, 8)};
  expect_layouts_equal("qwen3_5-tiny", short_packs, {{{.tp = 4}}, {{.cp = 2, .tp = 4}}}, Recompute::kNone,
                       {{"linear_num_key_heads", 4}, {"vocab_size", 1021}, {"intermediate_size", 385}});
}

TEST(TrainingOnAMesh, EqualsOneProcessWithRecompute) {
  expect_layouts_equal("qwen3_5_moe-tiny", packs(), {{{.cp = 2, .tp = 2, .ep = 2}}}, Recompute::kBlocks);
}

}  // namespace
}  // namespace sluice
