// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "sluice/rl/policy_testing.h"
#include "sluice/rl/token_advantages.h"

namespace sluice {
namespace {

// The denominators are the step's: what is packed together changes nothing but rounding.
TEST(UpdatePolicy, DoesNotDependOnHowResponsesArePacked) {
  std::vector<std::vector<double>> found;
  for (const std::int64_t seq_len : {30, 60, 2000}) {
    const auto model = tiny_model("qwen3_5-tiny");
    const auto prompts = random_prompts({6, 10});
    Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
    const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
    auto responses = sample(engine, prompts, 1, 20);
    for (const auto algorithm :
         {Algorithm::kGrpo, Algorithm::kDapo, Algorithm::kDrGrpo, Algorithm::kGspo, Algorithm::kCispo}) {
      Training training(model);
      ObjectiveOptions objective;
      objective.algorithm = algorithm;
      const auto update = update_policy(policy, algorithm_settings(objective), pointers(responses), seq_len, 20,
                                        training.gradients, training.optimizer, {.step = 1, .lr = 0, .clip_norm = 0});
      found.push_back({update.stats.loss, update.grad_norm, update.stats.entropy});
    }
  }
  for (std::size_t i = 5; i < found.size(); ++i) {
    for (int k = 0; k < 3; ++k) EXPECT_NEAR(found[i][k], found[i % 5][k], 2e-5 * (1 + std::abs(found[i % 5][k]))) << i;
  }
}

// A value head on the decoder, with weights that give values of different size.
std::unique_ptr<ValueHead> drawn_value_head(const Decoder& decoder) {
  auto head = std::make_unique<ValueHead>(decoder.head().size(1));
  initialize(head->parameters(), kFloat, 1);
  at::manual_seed(4);
  for (auto* parameter : head->parameters()) parameter->value = at::randn(parameter->shape) * 0.1;
  return head;
}

// What PPO needs to know before the step, and the advantages that follow.
AdvantageStats prepare_ppo(const Policy& policy, const AlgorithmSettings& settings,
                           std::vector<TrainedResponse>& responses) {
  const auto list = pointers(responses);
  const auto scores = score_responses(policy, list, pack_responses(list, 2000), /*replay=*/false);
  for (std::size_t i = 0; i < list.size(); ++i) {
    list[i]->old_logprobs = scores[i].logprobs;
    list[i]->old_values = scores[i].values;
    list[i]->reward = static_cast<double>(i % 3);
  }
  return set_token_advantages(list, settings);
}

ObjectiveOptions ppo() {
  ObjectiveOptions options;
  options.algorithm = Algorithm::kPpo;
  return options;
}

TEST(Ppo, TakesTheRewardWithTheLastTokenAndPaysForDivergence) {
  auto options = ppo();
  options.whiten = false;
  options.gamma = 0.9;
  options.kl_coef = 0.5;
  TrainedResponse r{.sample = {}, .rollout_logprobs = at::zeros({3})};
  r.reward = 2;
  r.old_logprobs = at::tensor({-1.0, -2.0, -3.0}, kFloat);
  r.reference_logprobs = at::tensor({-1.5, -2.0, -2.0}, kFloat);
  r.old_values = at::tensor({0.25, 0.5, -0.5}, kFloat);
  std::vector<TrainedResponse*> one{&r};
  set_token_advantages(one, algorithm_settings(options));
  // Rewards of the tokens: -0.5 x 0.5, 0, 2 + 0.5 x 1.
  const double returns[] = {-0.25 + 0.9 * 0.9 * 2.5, 0.9 * 2.5, 2.5};
  for (int t = 0; t < 3; ++t) {
    EXPECT_NEAR(r.returns[t].item<double>(), returns[t], 1e-6) << t;
    EXPECT_NEAR(r.advantages[t].item<double>(), returns[t] - r.old_values[t].item<double>(), 1e-6) << t;
  }
}

// Answers of a tiny model with a value head.
struct PpoStep : testing::Test {
  Model model = tiny_model("qwen3_5-tiny");
  std::vector<Prompt> prompts = random_prompts({6, 10});
  Engine engine{*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60}};
  std::unique_ptr<ValueHead> head = drawn_value_head(*model.decoder);
  Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable(), .value_head = head.get()};
  std::vector<TrainedResponse> responses = sample(engine, prompts, 1, 20);
};

TEST_F(PpoStep, WhitensTheCountedTokensOfAStepTogether) {
  responses[1].counted = false;
  prepare_ppo(policy, algorithm_settings(ppo()), responses);
  std::vector<Tensor> counted;
  for (const auto& response : responses) {
    if (response.counted) counted.push_back(response.advantages);
  }
  const auto all = at::cat(counted).to(kDouble);
  EXPECT_NEAR(all.mean().item<double>(), 0, 1e-7);
  EXPECT_NEAR(all.std().item<double>(), 1, 1e-6);
}

// The head learns what answers are worth, beside a policy that is not moved.
TEST_F(PpoStep, ValuesComeToExplainReturns) {
  auto options = ppo();
  options.value_clip = 10;
  const auto settings = algorithm_settings(options);
  const auto parameters = prepare(head->parameters(), {});
  GradientSum gradients(parameters);
  AdamW optimizer(parameters, {});
  const auto before = prepare_ppo(policy, settings, responses);
  double first = 0, last = 0;
  for (std::int64_t step = 1; step <= 40; ++step) {
    prepare_ppo(policy, settings, responses);
    last = update_policy(policy, settings, pointers(responses), 2000, 20, gradients, optimizer,
                         {.step = step, .lr = 0.03, .clip_norm = 0})
               .stats.value_loss;
    if (step == 1) first = last;
  }
  EXPECT_LT(last, first / 4);
  EXPECT_GT(prepare_ppo(policy, settings, responses).explained_variance, before.explained_variance);
  EXPECT_GT(prepare_ppo(policy, settings, responses).explained_variance, 0.5);
}

// The decoder learns from the head's errors too, as much as value_coef says.
TEST_F(PpoStep, TheValueLossReachesTheDecoder) {
  std::vector<double> norms;
  for (const double coef : {0.0, 0.1, 0.2}) {
    auto options = ppo();
    options.value_coef = coef;
    prepare_ppo(policy, algorithm_settings(options), responses);
    for (auto& response : responses) response.advantages.zero_();
    Training training(model);
    norms.push_back(update_policy(policy, algorithm_settings(options), pointers(responses), 2000, 20,
                                  training.gradients, training.optimizer, {.step = 1, .lr = 0, .clip_norm = 0})
                        .grad_norm);
  }
  EXPECT_EQ(norms[0], 0);
  EXPECT_GT(norms[1], 0);
  EXPECT_NEAR(norms[2] / norms[1], 2, 1e-4);
}

// With nothing else to gain, a step makes answers less predictable.
TEST(UpdatePolicy, RewardsEntropyWhereAskedTo) {
  const auto model = tiny_model("qwen3_5-tiny");
  const auto prompts = random_prompts({6, 10});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
  const Policy policy{.decoder = *model.decoder, .temperature = 0.8, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 0.8, 20);
  for (auto& response : responses) response.advantages.zero_();
  ObjectiveOptions options;
  options.entropy_coef = 0.1;
  Training training(model);
  const auto step = [&](std::int64_t number) {
    return update_policy(policy, algorithm_settings(options), pointers(responses), 200, 20, training.gradients,
                         training.optimizer, {.step = number, .lr = 1e-4, .clip_norm = 1})
        .stats;
  };
  const auto first = step(1);
  // Every answer has 20 tokens, so the mean over answers of their means is the mean over tokens.
  EXPECT_NEAR(first.loss, -0.1 * first.entropy / first.tokens, 1e-6);
  EXPECT_GT(step(2).entropy, first.entropy * (1 + 1e-4));
}

// One small step from where the samples came from: the advantage-weighted log-probability of their tokens rises.
TEST(UpdatePolicy, MakesGoodAnswersLikelier) {
  for (const auto algorithm :
       {Algorithm::kGrpo, Algorithm::kDapo, Algorithm::kDrGrpo, Algorithm::kGspo, Algorithm::kCispo}) {
    const auto model = tiny_model("qwen3_5-tiny");
    const auto prompts = random_prompts({6, 10});
    Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
    const Policy policy{.decoder = *model.decoder, .temperature = 0.8, .vocabulary = engine.drawable()};
    auto responses = sample(engine, prompts, 0.8, 20);
    Training training(model);
    ObjectiveOptions objective;
    objective.algorithm = algorithm;
    update_policy(policy, algorithm_settings(objective), pointers(responses), 200, 20, training.gradients,
                  training.optimizer, {.step = 1, .lr = 1e-4, .clip_norm = 1});
    const auto list = pointers(responses);
    const auto after = score_responses(policy, list, pack_responses(list, 200), /*replay=*/true);
    double gain = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto rise = (after[i].logprobs - list[i]->rollout_logprobs) * list[i]->advantages;
      gain += rise.sum().item<double>();
      EXPECT_GT(rise.mean().item<double>(), 0) << i;
    }
    EXPECT_GT(gain, 0.1);
  }
}

TEST(UpdatePolicy, OfMaskedResponsesAloneChangesNothing) {
  const auto model = tiny_model("qwen3_5-tiny");
  const auto prompts = random_prompts({6});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 20);
  for (auto& response : responses) response.counted = false;
  Training training(model);
  const auto before = model.parameters().at(3)->value.clone();
  EXPECT_TRUE(training.update(policy, responses).skipped);
  EXPECT_TRUE(model.parameters().at(3)->value.equal(before));
}

// A group without spread has advantages of 0: no loss, no gradient, and yet its tokens count.
TEST(UpdatePolicy, WithoutAdvantagesHasLossAndGradientZero) {
  const auto model = tiny_model("qwen3_5-tiny");
  const auto prompts = random_prompts({6});
  Engine engine(*model.decoder, tokenizer(), {}, {.slots = 3, .capacity = 60});
  const Policy policy{.decoder = *model.decoder, .temperature = 1, .vocabulary = engine.drawable()};
  auto responses = sample(engine, prompts, 1, 20);
  for (auto& response : responses) response.advantages.zero_();
  Training training(model);
  const auto update = training.update(policy, responses);
  EXPECT_EQ(update.stats.loss, 0);
  EXPECT_EQ(update.grad_norm, 0);
  EXPECT_EQ(update.stats.tokens, 60);
}

}  // namespace
}  // namespace sluice
