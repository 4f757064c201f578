// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/recorded_packs.h"

#include <gtest/gtest.h>

#include "sluice/models/testing.h"
#include "sluice/train/setup.h"
#include "sluice/train/testing.h"

namespace sluice {
namespace {

// Stands for recorded work where there is no GPU: it is done again.
class Again : public RecordedWork {
 public:
  Again(std::function<void()> work, int& replays) : work_(std::move(work)), replays_(replays) { work_(); }
  void replay() override {
    ++replays_;
    work_();
  }

 private:
  std::function<void()> work_;
  int& replays_;
};

struct Recorder {
  int records = 0, replays = 0;
  std::unique_ptr<RecordedWork> operator()(const std::function<void()>& work, RecordedWork* beside) {
    EXPECT_EQ(beside != nullptr, records > 0);
    ++records;
    return std::make_unique<Again>(work, replays);
  }
};

Model tiny(const nlohmann::json& config, at::ScalarType type) {
  auto model = build_model(config, "config", {});
  initialize(model.parameters(), type, 1);
  return model;
}

TEST(FilledShape, IsLargerByLessThanAnEighth) {
  for (std::int64_t tokens = 1; tokens < 600; ++tokens) {
    const auto pack = random_pack({tokens}, 1);
    const auto asked = std::ranges::count_if(pack.targets, [](auto target) { return target >= 0; });
    const auto shape = filled_shape(pack);
    EXPECT_GE(shape.tokens, tokens);
    EXPECT_LT(8 * (shape.tokens - tokens), tokens);
    EXPECT_GE(shape.asked, asked);
    EXPECT_LE(8 * (shape.asked - asked), asked);
    EXPECT_EQ(shape.sequences, shape.tokens > tokens ? 2 : 1);
  }
}

TEST(FilledShape, CountsTheSequenceThatFills) {
  EXPECT_EQ(filled_shape(random_pack({5, 5, 5, 1}, 1)).sequences, 4);  // 16 tokens
  EXPECT_EQ(filled_shape(random_pack({5, 5, 5, 2}, 1)).sequences, 8);  // 17, and one that fills up to 18
}

TEST(FilledBatch, HasOneMoreSequenceThenEmptyOnes) {
  const auto pack = random_pack({10, 1, 7, 1, 1}, 1);  // 20 tokens
  const auto own = to_batch(pack, at::kCPU), batch = filled_batch(pack, {24, 8, 17}, at::kCPU);
  EXPECT_TRUE(batch.pack.cu_seqlens.equal(at::tensor({0, 10, 11, 18, 19, 20, 24, 24, 24}, kInt)));
  EXPECT_TRUE(batch.tokens.equal(at::cat({own.tokens, own.tokens.narrow(0, 0, 4)})));
  EXPECT_TRUE(batch.pack.positions.narrow(0, 20, 4).equal(at::arange(4, kLong)));
  EXPECT_EQ(batch.pack.longest(), 24);
  const auto asked = own.asked.size(0);
  EXPECT_TRUE(batch.asked.narrow(0, 0, asked).equal(own.asked));
  EXPECT_TRUE(batch.targets.narrow(0, asked, 17 - asked).eq(kIgnoredTarget).all().item<bool>());
  EXPECT_TRUE(batch.loss_weight.narrow(0, asked, 17 - asked).eq(0).all().item<bool>());
}

// Three shapes: one of four packs, of which one is run, one recorded and two replayed, and two of one pack each, a
// single token among them.
std::vector<PackedBatch> packs_of_few_shapes() {
  std::vector<PackedBatch> packs{random_pack({1}, 9), random_pack({70, 3}, 8)};
  for (std::uint64_t seed = 0; packs.size() < 6; ++seed) {
    auto pack = seed % 2 == 0 ? random_pack({33, 1, 17}, seed) : random_pack({20, 29, 1}, seed);
    if (filled_shape(pack) == PackShape{52, 4, 36}) packs.push_back(std::move(pack));
  }
  return packs;
}

TEST(RecordedPacks, HaveTheLossesCountsAndGradientsOfThePacksThemselves) {
  const auto packs = packs_of_few_shapes();
  double weight = 0;
  for (const auto& pack : packs) weight += at::tensor(pack.loss_weight).sum().item<double>();
  for (const auto& [name, config] : tiny_configs()) {
    if (!tiny(config, kBFloat16).decoder->is_recordable()) continue;
    for (const auto recompute : {Recompute::kNone, Recompute::kBlocks}) {
      SCOPED_TRACE(fmt::format("{}, recompute {}", name, recompute == Recompute::kBlocks));
      const auto model = tiny(config, kFloat);
      const auto trained = prepare(trained_parameters(model, MtpTraining::kOff), {});
      model.decoder->set_recompute(recompute);
      const Objective objective{.decoder = *model.decoder};
      const auto want = evaluate(objective, packs);
      GradientSum plain(trained), gradients(trained);
      add_gradients(objective, packs, plain);
      Recorder recorder;
      RecordedPacks recorded(objective, gradients, std::ref(recorder));
      for (std::size_t i = 0; i < trained.size(); ++i) EXPECT_TRUE(gradients.of(i).defined());
      for (int step = 0; step < 2; ++step) {
        double loss = 0, right = 0;
        for (const auto& pack : packs) {
          const auto losses = recorded.add(pack, weight);
          EXPECT_EQ(losses.minimised.item<double>(), losses.parts[0].item<double>());
          loss += losses.parts[0].item<double>();
          right += losses.parts[3].item<double>();
        }
        EXPECT_EQ(recorder.records, step == 0 ? 1 : 3);
        EXPECT_EQ(recorder.replays, step == 0 ? 2 : 6);
        EXPECT_NEAR(loss, want.loss, kOtherOrder * want.loss);
        EXPECT_EQ(right / static_cast<double>(want.trained_tokens), want.accuracy);
        for (std::size_t i = 0; i < trained.size(); ++i) {
          if (plain.of(i).defined()) EXPECT_LT(relative(gradients.of(i), plain.of(i)), kOtherOrder) << trained[i]->name;
          else EXPECT_FALSE(gradients.of(i).any().item<bool>()) << trained[i]->name;
        }
        gradients.clear();
      }
    }
  }
}

TEST(RecordedPacks, HaveAtMostSoManyShapes) {
  std::map<PackShape, PackedBatch> packs;
  for (std::uint64_t seed = 0; packs.size() <= RecordedPacks::kMostShapes; ++seed) {
    auto pack = random_pack({static_cast<std::int64_t>(seed % 32) + 1}, seed);
    packs.emplace(filled_shape(pack), std::move(pack));
  }
  const auto model = tiny(tiny_configs().at("qwen3_5-tiny"), kFloat);
  const Objective objective{.decoder = *model.decoder};
  GradientSum gradients(prepare(trained_parameters(model, MtpTraining::kOff), {}));
  Recorder recorder;
  RecordedPacks recorded(objective, gradients, std::ref(recorder));
  for (int time = 0; time < 3; ++time) {
    for (const auto& [shape, pack] : packs) recorded.add(pack, /*weight=*/1);
  }
  EXPECT_EQ(recorder.records, RecordedPacks::kMostShapes);
  EXPECT_EQ(recorder.replays, RecordedPacks::kMostShapes);
}

TEST(RecordedPacks, AreRecordedAnewWhereAParameterLiesElsewhere) {
  for (const bool adapted : {false, true}) {
    const auto model = tiny(tiny_configs().at("qwen3_5-tiny"), kFloat);
    if (adapted) add_lora(model.parameters(), {}, kFloat, /*seed=*/1);
    auto adapters = share_dropout(model.parameters(), /*probability=*/0, /*seed=*/1);
    const Objective objective{.decoder = *model.decoder, .adapters = adapted ? adapters.get() : nullptr};
    const auto trained = prepare(trained_parameters(model, MtpTraining::kOff), {});
    GradientSum gradients(trained);
    Recorder before, after;
    bool moved = false;
    RecordedPacks recorded(objective, gradients, [&](const std::function<void()>& work, RecordedWork* beside) {
      return moved ? after(work, beside) : before(work, beside);
    });
    const auto pack = random_pack({20}, 1);
    for (int time = 0; time < 3; ++time) recorded.add(pack, /*weight=*/1);
    moved = true;
    trained.front()->value.set_data(trained.front()->value.detach().clone());
    for (int time = 0; time < 2; ++time) recorded.add(pack, /*weight=*/1);
    for (const auto& recorder : {before, after}) {
      EXPECT_EQ(recorder.records, 1);
      EXPECT_EQ(recorder.replays, 1);
    }
  }
}

TEST(LaunchesBind, WhereTheyTakeLongerThanThePackWouldRun) {
  const auto& presets = families().at(0).presets;
  const auto binds = [&](const std::string& name, std::int64_t tokens) {
    for (const auto& [preset, config] : presets) {
      if (preset != name) continue;
      const auto model = build_model(nlohmann::json::parse(config), "config", {});
      return launches_bind({.decoder = *model.decoder}, tokens);
    }
    throw std::out_of_range(name);
  };
  // 24 blocks of width 1024, of about 4.7e9 operations a token: 4,500 tokens take the device 53 ms.
  EXPECT_TRUE(binds("qwen3_5-0.8b", 4096));
  EXPECT_FALSE(binds("qwen3_5-0.8b", 5120));
}

TEST(WhyNotRecorded, NamesWhatTakesTheHostOrCountsTheFilling) {
  const auto configs = tiny_configs();
  const Mesh two({.dp = 2}, /*rank=*/0);
  const auto dense = build_model(configs.at("qwen3_5-tiny"), "config", {.mtp = true});
  initialize(dense.parameters(), kBFloat16, 1);
  auto& decoder = *dense.decoder;
  EXPECT_EQ(why_not_recorded({.decoder = decoder}), "");
  EXPECT_EQ(why_not_recorded({.decoder = decoder, .router_aux_loss_coef = 0.1}),
            "the load-balancing loss counts every token of a pack");
  EXPECT_EQ(why_not_recorded({.decoder = decoder, .mtp = dense.mtp.get()}), "multi-token prediction is trained");
  LoraDropout adapters{.probability = 0.1};
  EXPECT_EQ(why_not_recorded({.decoder = decoder, .adapters = &adapters}), "the host draws what adapters drop");
  adapters.probability = 0;
  EXPECT_EQ(why_not_recorded({.decoder = decoder, .adapters = &adapters}), "");
  decoder.set_mesh(two);
  EXPECT_EQ(why_not_recorded({.decoder = decoder}), "processes exchange tensors within it");
  const auto sparse = tiny(configs.at("qwen3_8_flash_next-tiny"), kBFloat16);  // an indexer, n-gram embeddings
  EXPECT_EQ(why_not_recorded({.decoder = *sparse.decoder}), "the host takes part in this model's layers");
}

}  // namespace
}  // namespace sluice
