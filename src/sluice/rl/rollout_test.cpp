// SPDX-License-Identifier: Apache-2.0
// The trainer scores the very tokens that the engine drew, at the same temperature: their log-probabilities agree, for
// every family, and a difference between the weights of the two shows. Replayed choices are those of sampling.
#include "sluice/rl/rollout.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/rl/policy_testing.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A float32 log-probability of size 10 is rounded to 1e-6; hidden states of decoding and of a whole pack differ by
// 2e-6 (docs/design.md), and so do logits of size 10.
constexpr double kBound = 1e-5;

TEST(RolloutAgainstTraining, AgreesForEveryFamilyBeforeAndAfterUpdatesAndSleep) {
  for (const auto& [preset, config] : tiny_configs()) {
    for (const double temperature : {1.0, 0.7}) {
      SCOPED_TRACE(fmt::format("{} at {}", preset, temperature));
      const auto model = tiny_model(preset);
      const auto prompts = random_prompts({5, 40, 3});
      Engine engine(*model.decoder, tokenizer(), {}, {.slots = 4, .capacity = 80, .tokens_per_step = 48});
      const Policy policy{.decoder = *model.decoder, .temperature = temperature, .vocabulary = engine.drawable()};
      auto before = sample(engine, prompts, temperature, 24);
      EXPECT_LT(drift(policy, before), kBound);
      Training training(model);
      const auto update = training.update(policy, before);
      EXPECT_EQ(update.stats.ratio_max, 1);
      EXPECT_EQ(update.stats.clipped_low + update.stats.clipped_high, 0);
      EXPECT_GT(update.grad_norm, 0);
      EXPECT_GT(drift(policy, before), 1e-3);  // the update is seen
      auto after = sample(engine, prompts, temperature, 24, /*first_stream=*/100);
      EXPECT_LT(drift(policy, after), kBound);
    }
  }
}

// The preset attends to 16 blocks of 4 tokens: past 64 tokens attention is sparse.
TEST(RolloutAgainstTraining, AgreesPastTheSparseBudget) {
  const auto model = tiny_model("qwen3_8_flash_next-tiny");
  const auto prompts = random_prompts({30, 150, 90});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 5, .capacity = 300, .tokens_per_step = 64});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 120);
  EXPECT_LT(drift(policy, responses), kBound);
}

TEST(RolloutAgainstTraining, AgreesWithAdaptersWhateverTheyHold) {
  const auto model = tiny_model("qwen3_5-tiny");
  const auto parameters = model.parameters();
  add_lora(parameters, {.rank = 4}, kFloat, 3);
  const auto prompts = random_prompts({6, 20});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto zero = sample(engine, prompts, 1, 20);
  EXPECT_LT(drift(policy, zero), kBound);
  {
    const WithoutAdapters base(parameters);
    EXPECT_LT(drift(policy, zero), kBound);  // B is 0: the adapter changes nothing yet
  }
  Training training(model);
  training.update(policy, zero);
  EXPECT_GT(drift(policy, zero), 1e-4);
  {
    const WithoutAdapters base(parameters);
    EXPECT_LT(drift(policy, zero), kBound);  // the reference is still the base
  }
  auto trained = sample(engine, prompts, 1, 20, /*first_stream=*/100);
  EXPECT_LT(drift(policy, trained), kBound);
}

// Turns are scored as they were sampled, each behind all that came before it; what the environment said is not trained.
TEST(RolloutAgainstTraining, AgreesOverTheTurnsOfAnEpisode) {
  const auto file = std::filesystem::path(testing::TempDir()) / fmt::format("sluice_environment_{}.py", ::getpid());
  write_file(file,
             "class Echo:\n"
             "    def __init__(self, prompt, answer, record): self.turns = 0\n"
             "    def step(self, completion):\n"
             "        self.turns += 1\n"
             "        return f'turn {self.turns}: ' + completion[:10], 1, self.turns == 3\n");
  Surroundings surroundings{.environment = Environment({.python = file.string() + ":Echo"}),
                            .glue = TurnGlue(SLUICE_SOURCE_DIR "/examples/tiny/tokenizer", {})};
  for (const auto* preset : {"qwen3_5-tiny", "qwen3_8_flash_next-tiny"}) {
    SCOPED_TRACE(preset);
    const auto model = tiny_model(preset);
    const auto prompts = random_prompts({6, 40});
    Engine engine(*model.decoder, tokenizer(), {}, {.slots = 4, .capacity = 200, .tokens_per_step = 48});
    const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
    auto responses = sample(engine, prompts, 1, 12, 0, /*keep_choices=*/true, &surroundings);
    for (const auto& response : responses) {
      EXPECT_EQ(response.tokens(), 36);  // three turns
      EXPECT_EQ(std::ranges::count(response.sample.loss_mask, 1), 36);
      EXPECT_GT(std::ssize(response.sample.tokens), 6 + 36 + 2 * 10);
    }
    EXPECT_LT(drift(policy, responses), kBound);
    Training training(model);
    EXPECT_EQ(training.update(policy, responses).stats.tokens, 6 * 36);
  }
}

// Weights that the engine did not see: a hundredth of one matrix is enough to show.
TEST(RolloutAgainstTraining, ShowsWeightsThatTheEngineHasNotSeen) {
  const auto model = tiny_model("qwen3_5-tiny");
  const auto prompts = random_prompts({6, 20});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 20);
  auto& weight = model.parameters().at(3)->value;
  weight.mul_(1.01);
  EXPECT_GT(drift(policy, responses), 10 * kBound);
  // The same in what an update reports, which becomes rollout/dlogp_mean and rollout/dlogp_max.
  Training training(model);
  const auto stats = training.update(policy, responses).stats;
  EXPECT_GT(stats.mismatch / stats.tokens, 10 * kBound);
  EXPECT_GT(stats.mismatch_max, stats.mismatch / stats.tokens);
}

TEST(RolloutAgainstTraining, ShowsAnotherTemperature) {
  const auto model = tiny_model("qwen3_5-tiny");
  const auto prompts = random_prompts({6});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
  auto responses = sample(engine, prompts, 0.9, 20);
  const Policy other{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  EXPECT_GT(drift(other, responses), 1e-2);
}

// In bfloat16 decoding and whole packs round differently: routers near a tie choose other experts, and
// log-probabilities with them. Replay sends every token where sampling sent it, in the forward pass and in its
// recomputation.
TEST(RouterReplay, SendsTokensWhereSamplingSentThem) {
  for (const auto* preset : {"qwen3_5_moe-tiny", "qwen3_8_flash_next-tiny"}) {
    for (const auto recompute : {Recompute::kNone, Recompute::kBlocks}) {
      SCOPED_TRACE(preset);
      const auto model = tiny_model(preset, kBFloat16);
      model.decoder->set_recompute(recompute);
      const auto prompts = random_prompts({30, 5, 18});
      Engine engine(*model.decoder, tokenizer(), {}, {.slots = 4, .capacity = 80, .tokens_per_step = 40});
      const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
      auto responses = sample(engine, prompts, 1, 40, 0, /*keep_choices=*/true);
      for (const auto& response : responses) {
        EXPECT_EQ(response.experts.chosen.size(0), std::ssize(response.sample.tokens) - 1);
        EXPECT_EQ(response.experts.chosen.size(1), model.decoder->num_blocks());
      }
      // Hidden states of size 1 are rounded to 2^-9, in every layer, and make logits that differ by some hundredths.
      EXPECT_LT(drift(policy, responses), 0.1);
      Training training(model);
      const auto update = training.update(policy, responses);
      EXPECT_GT(update.stats.routed, 0);
      // Some live choices differ; the other preset's few tokens are none near a tie.
      EXPECT_GE(update.stats.rerouted, preset == std::string_view("qwen3_5_moe-tiny") ? 1 : 0);
      EXPECT_LT(update.stats.rerouted, 0.2 * update.stats.routed);
      auto free = responses;
      for (auto& response : free) response.experts = response.key_blocks = {};
      EXPECT_EQ(update_policy(policy, algorithm_settings({}), pointers(free), 2000, 64, training.gradients,
                              training.optimizer, {.step = 2, .lr = 0, .clip_norm = 1})
                    .stats.routed,
                0);
    }
  }
}

// In float32 the choices are the same, and replaying them gives the plain pass bit for bit.
TEST(Replay, OfAModelsOwnChoicesIsThePlainPass) {
  for (const auto* preset : {"qwen3_5_moe-tiny", "qwen3_8_flash_next-tiny"}) {
    const auto model = tiny_model(preset);
    const auto prompts = random_prompts({30, 75});  // the second is past the sparse attention's budget
    Engine engine(*model.decoder, tokenizer(), {}, {.slots = 4, .capacity = 110});
    const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
    auto responses = sample(engine, prompts, 1, 30, 0, /*keep_choices=*/true);
    const auto list = pointers(responses);
    const auto packs = pack_responses(list, 2000);
    const auto replayed = score_responses(policy, list, packs, true),
               live = score_responses(policy, list, packs, false);
    for (std::size_t i = 0; i < list.size(); ++i) {
      EXPECT_TRUE(replayed[i].logprobs.equal(live[i].logprobs)) << preset << " " << i;
    }
  }
}

// The gates' weights come from the live probabilities: other experts give other numbers and still a gradient.
TEST(RouterReplay, TakesTheChoiceAndNotTheWeights) {
  const auto model = tiny_model("qwen3_5_moe-tiny");
  const auto prompts = random_prompts({12});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 40});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 20, 0, /*keep_choices=*/true);
  EXPECT_LT(drift(policy, responses), kBound);
  for (auto& response : responses) response.experts.chosen = (response.experts.chosen + 1).remainder(16);  // others
  EXPECT_GT(drift(policy, responses), 1e-3);
  Training training(model);
  const auto update = training.update(policy, responses);
  EXPECT_GT(update.grad_norm, 0);
  EXPECT_TRUE(std::isfinite(update.grad_norm));
}

// A token whose experts are not known goes anew, as the last one of every response does, and is counted; the others of
// its pack are replayed.
TEST(RouterReplay, TokensWithoutAChoiceGoAnew) {
  const auto model = tiny_model("qwen3_5_moe-tiny");
  const auto prompts = random_prompts({12, 7});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 6, .capacity = 40});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 20, 0, /*keep_choices=*/true);
  std::int64_t tokens = 0;
  for (const auto& response : responses) tokens += std::ssize(response.sample.tokens) - 1;
  EXPECT_EQ(check_replay(responses, /*strict=*/true).tokens, tokens);
  EXPECT_EQ(check_replay(responses, /*strict=*/true).missing, 0);

  responses[1].sample.place = "prompts.jsonl:2";
  responses[1].experts.chosen = responses[1].experts.chosen.clone();
  responses[1].experts.chosen[5].fill_(-1);  // a row in the middle
  const auto all_of = std::ssize(responses[2].sample.tokens) - 1;
  responses[2].experts = {};
  EXPECT_EQ(check_replay(responses, /*strict=*/false).tokens, tokens);
  EXPECT_EQ(check_replay(responses, /*strict=*/false).missing, 1 + all_of);
  try {
    check_replay(responses, /*strict=*/true);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("prompts.jsonl:2"), std::string::npos) << error.what();
  }
  EXPECT_LT(drift(policy, responses), kBound);  // in float32 live choices are those of sampling
  Training training(model);
  EXPECT_EQ(training.update(policy, responses).stats.routed, (tokens - 1 - all_of) * model.decoder->num_blocks());

  for (auto& response : responses) response.experts = {};  // as of a model without experts
  EXPECT_EQ(check_replay(responses, /*strict=*/false).tokens, 0);
  EXPECT_THROW(check_replay(responses, /*strict=*/true), Error);
}

// What was recorded for other tokens, or is no choice, is refused.
TEST(RouterReplay, RefusesWhatDoesNotFit) {
  const auto model = tiny_model("qwen3_5_moe-tiny");
  const auto prompts = random_prompts({12});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 40});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  const auto sampled = sample(engine, prompts, 1, 20, 0, /*keep_choices=*/true);
  const std::vector<std::function<void(Tensor&)>> faults{
      [](Tensor& chosen) { chosen = chosen.narrow(0, 0, chosen.size(0) - 1); },
      [](Tensor& chosen) { chosen[3][1][0].fill_(1000); }, [](Tensor& chosen) { chosen[3][1].fill_(2); },
      [](Tensor& chosen) { chosen[3][1][1].fill_(-1); }};
  for (const auto& make_fault : faults) {
    auto responses = sampled;
    responses[0].experts.chosen = responses[0].experts.chosen.clone();
    make_fault(responses[0].experts.chosen);
    EXPECT_THROW(drift(policy, responses), std::runtime_error);
  }
}

// Keys that sampling did not attend to give other numbers, and the same gradient whether blocks are computed again or
// not: all passes take them.
TEST(IndexReplay, AttendsToTheBlocksThatAreGiven) {
  std::vector<double> norms;
  for (const auto recompute : {Recompute::kNone, Recompute::kBlocks}) {
    const auto model = tiny_model("qwen3_8_flash_next-tiny");
    model.decoder->set_recompute(recompute);
    const auto prompts = random_prompts({10, 90});
    Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 130, .tokens_per_step = 40});
    const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
    auto responses = sample(engine, prompts, 1, 40, 0, /*keep_choices=*/true);
    EXPECT_LT(drift(policy, responses), kBound);
    for (auto& response : responses) {
      auto& chosen = response.key_blocks.chosen;  // [tokens - 1, 1, 16]
      ASSERT_EQ(chosen.size(0), std::ssize(response.sample.tokens) - 1);
      EXPECT_EQ(response.key_blocks.blocks, std::vector<std::int64_t>{3});
      const auto is_choice = chosen.select(2, chosen.size(2) - 1) >= 0;  // where there are more blocks than are chosen
      const auto first = at::arange(chosen.size(2), chosen.options()).expand_as(chosen);
      chosen = at::where(is_choice.unsqueeze(2), first, chosen);
    }
    EXPECT_GT(drift(policy, responses), 1e-3);
    Training training(model);
    const auto update = training.update(policy, responses);
    EXPECT_GT(update.stats.reindexed, 0);
    norms.push_back(update.grad_norm);
  }
  EXPECT_NEAR(norms[0], norms[1], 1e-6 * norms[0]);
}

// Token 70 sees 71 tokens, so the complete blocks 0 to 16; its sequence has 32. It takes 16 blocks, in rising order.
TEST(IndexReplay, RefusesWhatIsNoChoiceOfBlocks) {
  const auto model = tiny_model("qwen3_8_flash_next-tiny");
  const auto prompts = random_prompts({90});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 130});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 40, 0, /*keep_choices=*/true);
  const auto with_last_blocks = [&](std::int64_t fourteenth, std::int64_t fifteenth) -> std::string {
    auto& chosen = responses[0].key_blocks.chosen;
    chosen = chosen.clone();
    auto row = chosen[70][0];
    row.copy_(at::arange(row.size(0)));
    row[14].fill_(fourteenth);
    row[15].fill_(fifteenth);
    try {
      drift(policy, responses);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(with_last_blocks(14, 16), "");
  EXPECT_THAT(with_last_blocks(14, 17), AllOf(HasSubstr("replay: block 3: 1 of "), HasSubstr("14, 17] of 17 options")));
  for (const std::int64_t not_above : {14, 15}) {
    EXPECT_THAT(with_last_blocks(15, not_above),
                AllOf(HasSubstr("replay: block 3: 1 of "), HasSubstr("no choice of 16 in rising order"),
                      HasSubstr(fmt::format("13, 15, {}] of 17 options", not_above))));
  }
}

// In bfloat16 decoding and whole packs round differently, and blocks near a tie may change places.
TEST(IndexReplay, KeepsToSamplingInBfloat16) {
  const auto model = tiny_model("qwen3_8_flash_next-tiny", kBFloat16);
  const auto prompts = random_prompts({90});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 170});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 80, 0, /*keep_choices=*/true);
  EXPECT_LT(drift(policy, responses), 0.1);
  Training training(model);
  const auto update = training.update(policy, responses);
  EXPECT_GT(update.stats.indexed, 0);
  EXPECT_LT(update.stats.reindexed, 0.2 * update.stats.indexed);
}

}  // namespace
}  // namespace sluice
