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

// An answer on its way.
struct Episode {
  const Prompt* prompt;
  Response* response;
  std::uint64_t stream;
  std::vector<TokenId> tokens;  // prompt and answer so far
  std::int64_t number = 0;      // the environment's
};

// The model's next turn of each of these, in their order; `is_last`: none can come after it.
std::vector<Completion> sample_turn(Engine& engine, const std::vector<Episode*>& episodes,
                                    const GenerationSettings& settings, bool is_last) {
  std::vector<Completion> completions(episodes.size());
  for (std::size_t i = 0; i < episodes.size(); ++i) {
    const auto& e = *episodes[i];
    const auto room = settings.longest > 0 ? settings.longest - std::ssize(e.tokens) : settings.max_tokens;
    engine.submit({.prompt = e.tokens,
                   .max_tokens = std::min(settings.max_tokens, room),
                   .sampling = {.temperature = settings.temperature,
                                .seed = settings.seed,
                                .sequence = e.stream,
                                .drawn = e.response->completion.logprobs.size()},
                   .stop = {},
                   .keep_experts = settings.keep_experts,
                   .keep_key_blocks = settings.keep_key_blocks,
                   .keep_state = !is_last,
                   .on_text = {},
                   .on_finish = [&completion = completions[i]](const Completion& c) { completion = c; }});
  }
  engine.run();
  return completions;
}

// Choices for the tokens behind those that have one already.
void append(Choices& all, const Choices& turn) {
  if (!turn.chosen.defined()) return;
  const auto known = all.chosen.defined() ? all.chosen.size(0) : 0;
  const auto rest = turn.chosen.narrow(0, known, turn.chosen.size(0) - known);
  all = {.blocks = turn.blocks, .chosen = known > 0 ? at::cat({all.chosen, rest}) : rest};
}

// The model's turn becomes part of its answer.
void append(Episode& e, const Completion& turn) {
  auto& all = e.response->completion;
  e.tokens.insert(e.tokens.end(), turn.tokens.begin(), turn.tokens.end());
  all.tokens.insert(all.tokens.end(), turn.tokens.begin(), turn.tokens.end());
  all.logprobs.insert(all.logprobs.end(), turn.logprobs.begin(), turn.logprobs.end());
  all.model_logprobs.insert(all.model_logprobs.end(), turn.model_logprobs.begin(), turn.model_logprobs.end());
  all.text += turn.text;
  all.finish_reason = turn.finish_reason;
  append(all.experts, turn.experts);
  append(all.key_blocks, turn.key_blocks);
  e.response->sampled.resize(all.tokens.size(), 1);
}

// What the environment said becomes part of it. False: then there is no room for another turn, and it does not.
bool append(Episode& e, const std::string& observation, const TurnGlue& glue, std::int64_t longest) {
  const auto said = glue.between(e.tokens.back(), observation);
  auto& all = e.response->completion;
  if (std::ssize(e.tokens) + std::ssize(said) >= longest) {
    all.finish_reason = FinishReason::kLength;
    return false;
  }
  e.tokens.insert(e.tokens.end(), said.begin(), said.end());
  all.tokens.insert(all.tokens.end(), said.begin(), said.end());
  all.text += glue.decode(said);
  e.response->sampled.resize(all.tokens.size(), 0);
  ++e.response->turns;
  return true;
}

void play(Engine& engine, std::vector<Episode>& episodes, const GenerationSettings& settings, Surroundings& around) {
  auto& [environment, glue] = around;
  std::vector<const Prompt*> prompts;
  for (const auto& e : episodes) prompts.push_back(e.prompt);
  const auto numbers = environment.begin(prompts);
  std::vector<Episode*> open;
  for (std::size_t i = 0; i < episodes.size(); ++i) {
    if (!numbers[i]) continue;
    episodes[i].number = *numbers[i];
    episodes[i].response->episode_reward = 0;
    open.push_back(&episodes[i]);
  }
  std::vector<std::int64_t> left;  // by us
  for (std::int64_t turn = 1; !open.empty(); ++turn) {
    const auto completions = sample_turn(engine, open, settings, turn == environment.max_turns());
    std::vector<Environment::Turn> turns;
    for (std::size_t i = 0; i < open.size(); ++i) {
      append(*open[i], completions[i]);
      turns.push_back({.episode = open[i]->number, .completion = completions[i].text});
    }
    const auto outcomes = environment.step(turns);
    std::vector<Episode*> going_on;
    for (std::size_t i = 0; i < open.size(); ++i) {
      auto& response = *open[i]->response;
      if (!outcomes[i]) {
        response.episode_reward.reset();
        continue;
      }
      *response.episode_reward += outcomes[i]->reward;
      if (outcomes[i]->done) continue;
      if (turn == environment.max_turns()) response.completion.finish_reason = FinishReason::kLength;
      if (turn < environment.max_turns() && append(*open[i], outcomes[i]->observation, glue, settings.longest)) {
        going_on.push_back(open[i]);
      } else {
        left.push_back(open[i]->number);
      }
    }
    open = std::move(going_on);
  }
  environment.end(left);
}

}  // namespace

std::vector<AnswerGroup> sample_groups(Engine& engine, const std::vector<Prompt>& prompts,
                                       std::span<const std::size_t> chosen, const GenerationSettings& settings,
                                       std::uint64_t first_stream, Surroundings* surroundings) {
  std::vector<AnswerGroup> groups;
  for (const auto prompt : chosen) {
    groups.push_back(
        {.prompt = prompt, .responses = std::vector<Response>(static_cast<std::size_t>(settings.samples))});
  }
  std::vector<Episode> episodes;
  for (auto& group : groups) {
    const auto& prompt = prompts[group.prompt];
    for (auto& response : group.responses) {
      episodes.push_back({.prompt = &prompt,
                          .response = &response,
                          .stream = first_stream + episodes.size(),
                          .tokens = prompt.tokens});
    }
  }
  if (surroundings != nullptr) {
    play(engine, episodes, settings, *surroundings);
  } else {
    std::vector<Episode*> all;
    for (auto& e : episodes) all.push_back(&e);
    const auto completions = sample_turn(engine, all, settings, /*is_last=*/true);
    for (std::size_t i = 0; i < all.size(); ++i) append(*all[i], completions[i]);
  }
  engine.sleep();
  return groups;
}

void judge(std::vector<AnswerGroup>& groups, const std::vector<Prompt>& prompts, Rewards& rewards) {
  std::vector<AnsweredPrompt> answers;
  for (const auto& group : groups) {
    for (const auto& response : group.responses) {
      answers.push_back({.prompt = &prompts[group.prompt],
                         .completion = response.completion.text,
                         .tokens = std::ssize(response.completion.logprobs),
                         .episode_reward = response.episode_reward});
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
