// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/rollout.h"

#include <algorithm>
#include <iterator>

namespace sluice {
namespace {

std::vector<double> rewards_of(const AnswerGroup& group) {
  std::vector<double> rewards;
  for (const auto& response : group.responses) rewards.push_back(response.verdict->reward);
  return rewards;
}

}  // namespace

std::vector<AnswerGroup> sample_groups(Engine& engine, const std::vector<Prompt>& prompts,
                                       std::span<const std::size_t> chosen, const GenerationSettings& settings,
                                       std::uint64_t first_stream) {
  std::vector<AnswerGroup> groups;
  for (const auto prompt : chosen) {
    groups.push_back(
        {.prompt = prompt, .responses = std::vector<Response>(static_cast<std::size_t>(settings.samples))});
  }
  auto stream = first_stream;
  for (auto& group : groups) {
    for (auto& response : group.responses) {
      engine.submit({.prompt = prompts[group.prompt].tokens,
                     .max_tokens = settings.max_tokens,
                     .sampling = {.temperature = settings.temperature, .seed = settings.seed, .sequence = stream++},
                     .stop = {},
                     .keep_experts = settings.keep_experts,
                     .on_text = {},
                     .on_finish = [&response](const Completion& completion) { response.completion = completion; }});
    }
  }
  engine.run();
  engine.sleep();
  return groups;
}

void judge(std::vector<AnswerGroup>& groups, const std::vector<Prompt>& prompts, Rewards& rewards) {
  std::vector<AnsweredPrompt> answers;
  for (const auto& group : groups) {
    for (const auto& response : group.responses) {
      answers.push_back({.prompt = &prompts[group.prompt],
                         .completion = response.completion.text,
                         .tokens = std::ssize(response.completion.tokens)});
    }
  }
  auto verdicts = rewards.judge(answers);
  auto next = verdicts.begin();
  for (auto& group : groups) {
    for (auto& response : group.responses) response.verdict = std::move(*next++);
  }
}

std::vector<Response> take_unjudged(AnswerGroup& group) {
  const auto unjudged = std::ranges::stable_partition(
      group.responses, [](const Response& response) { return response.verdict.has_value(); });
  std::vector<Response> taken(std::make_move_iterator(unjudged.begin()), std::make_move_iterator(unjudged.end()));
  group.responses.erase(unjudged.begin(), unjudged.end());
  return taken;
}

bool has_no_signal(const AnswerGroup& group) {
  std::vector<double> rewards;
  for (const auto& response : group.responses) rewards.push_back(response.verdict->parts.front());
  return is_uniform(rewards);
}

bool has_no_spread(const AnswerGroup& group) { return is_uniform(rewards_of(group)); }

void set_advantages(AnswerGroup& group, Advantage kind) {
  const auto advantages = group_advantages(rewards_of(group), kind);
  for (std::size_t i = 0; i < advantages.size(); ++i) group.responses[i].advantage = advantages[i];
}

}  // namespace sluice
