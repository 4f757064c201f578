// SPDX-License-Identifier: Apache-2.0
// For tests: answers of tiny random models, as the trainer takes them, and a trainer of them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/models/testing.h"
#include "sluice/rl/policy.h"
#include "sluice/rl/rollout.h"
#include "sluice/train/setup.h"

namespace sluice {

// Random weights, spread so that probabilities differ clearly.
inline Model tiny_model(const std::string& preset, at::ScalarType dtype = kFloat) {
  auto config = tiny_configs().at(preset);
  config["initializer_range"] = 0.08;
  auto model = build_model(config, preset);
  initialize(model.parameters(), dtype, 1);
  return model;
}

inline const Tokenizer& tokenizer() {
  static const auto loaded = Tokenizer::load(SLUICE_SOURCE_DIR "/examples/tiny/tokenizer");
  return loaded;
}

inline std::vector<Prompt> random_prompts(std::initializer_list<std::size_t> lengths) {
  std::vector<Prompt> prompts;
  TokenId next = 7;
  for (const auto length : lengths) {
    Prompt prompt{.tokens = {}, .record = {}, .place = "test"};
    while (prompt.tokens.size() < length) prompt.tokens.push_back(next = (next * 37 + 11) % 1000);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

// Three answers to each prompt, as the trainer takes them.
inline std::vector<TrainedResponse> sample(Engine& engine, const std::vector<Prompt>& prompts, double temperature,
                                           std::int64_t max_tokens, std::uint64_t first_stream = 0,
                                           bool keep_choices = false, Surroundings* surroundings = nullptr) {
  std::vector<std::size_t> all(prompts.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  const auto groups = sample_groups(engine, prompts, all,
                                    {.samples = 3,
                                     .max_tokens = max_tokens,
                                     .temperature = temperature,
                                     .seed = 5,
                                     .longest = surroundings != nullptr ? 200 : 0,
                                     .keep_experts = keep_choices,
                                     .keep_key_blocks = keep_choices},
                                    first_stream, surroundings);
  std::vector<TrainedResponse> responses;
  for (const auto& group : groups) {
    for (const auto& response : group.responses) {
      TrainedResponse r{.sample = {.tokens = prompts[group.prompt].tokens, .loss_mask = {}, .place = ""},
                        .rollout_logprobs = at::tensor(response.completion.logprobs, kFloat),
                        .experts = response.completion.experts,
                        .key_blocks = response.completion.key_blocks};
      r.advantages = at::full({r.tokens()}, responses.size() % 2 == 0 ? 1 : -1, kFloat);
      r.sample.loss_mask.resize(r.sample.tokens.size(), 0);
      const auto& tokens = response.completion.tokens;
      r.sample.tokens.insert(r.sample.tokens.end(), tokens.begin(), tokens.end());
      r.sample.loss_mask.insert(r.sample.loss_mask.end(), response.sampled.begin(), response.sampled.end());
      responses.push_back(std::move(r));
    }
  }
  return responses;
}

inline std::vector<TrainedResponse*> pointers(std::vector<TrainedResponse>& responses) {
  std::vector<TrainedResponse*> list;
  for (auto& response : responses) list.push_back(&response);
  return list;
}

// Mean |log-probability of the trainer - of the sampler|.
inline double drift(const Policy& policy, std::vector<TrainedResponse>& responses) {
  const auto list = pointers(responses);
  const auto found = score_responses(policy, list, pack_responses(list, 2000), /*replay=*/true);
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    sum += (found[i].logprobs - list[i]->rollout_logprobs).abs().sum().item<double>();
    count += static_cast<double>(list[i]->tokens());
  }
  return sum / count;
}

// A model's parameters with an optimizer that moves them far at once.
struct Training {
  explicit Training(const Model& model)
      : parameters(prepare(trained_parameters(model, MtpTraining::kOff), {})),
        gradients(parameters),
        optimizer(parameters, {}) {}
  PolicyUpdate update(const Policy& policy, std::vector<TrainedResponse>& responses) {
    return update_policy(policy, algorithm_settings({}), pointers(responses), 2000, 64, gradients, optimizer,
                         {.step = 1, .lr = 3e-3, .clip_norm = 1});
  }
  std::vector<Parameter*> parameters;
  GradientSum gradients;
  AdamW optimizer;
};

}  // namespace sluice
