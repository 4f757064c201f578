// SPDX-License-Identifier: Apache-2.0
// Answers that a model gives to prompts, and what becomes of them: sampled, judged, compared within their group.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sluice/rl/environment.h"
#include "sluice/rl/rewards.h"
#include "sluice/sample/engine.h"

namespace sluice {

// One answer; in an environment all turns of an episode. `completion` then has in `tokens` and `text` also what the
// environment said between them, as the model read it, and in everything else what belongs to the sampled tokens.
struct Response {
  Completion completion;
  std::vector<char> sampled;  // of completion.tokens: 0 for the environment's
  std::int64_t turns = 1;
  std::optional<double> episode_reward;  // the sum over its turns; none: no environment, or it failed
  std::optional<Verdict> verdict;        // none: it could not be judged
  std::optional<double> advantage = {};  // within its group, where it was compared
};

// The answers to one prompt.
struct AnswerGroup {
  std::size_t prompt;  // its place among the run's
  std::vector<Response> responses;
};

struct GenerationSettings {
  std::int64_t samples;     // answers to each prompt
  std::int64_t max_tokens;  // of an answer
  double temperature;
  std::uint64_t seed;
  std::int64_t longest = 0;                            // tokens of a whole episode with its prompt
  bool keep_experts = false, keep_key_blocks = false;  // for their replay
};

// Where answers are the turns of an episode.
struct Surroundings {
  Environment environment;
  TurnGlue glue;
};

// A group for each of the `chosen` prompts. The n-th answer of all draws from stream `first_stream` + n of the seed, so
// it does not depend on what else is sampled. With surroundings, which may be null, answers go on for as many turns as
// the environment asks for, or as fit; a turn goes on from the very tokens that were sampled so far, and from
// the state that they left where its slot was not needed since. The engine sleeps afterwards.
std::vector<AnswerGroup> sample_groups(Engine& engine, const std::vector<Prompt>& prompts,
                                       std::span<const std::size_t> chosen, const GenerationSettings& settings,
                                       std::uint64_t first_stream, Surroundings* surroundings);

// Fills in the verdicts.
void judge(std::vector<AnswerGroup>& groups, const std::vector<Prompt>& prompts, Rewards& rewards);

// Takes the answers that could not be judged out of a group.
std::vector<Response> take_unjudged(AnswerGroup& group);

// True where all answers have the same first reward, the task's own.
bool has_no_signal(const AnswerGroup& group);

// True where all answers have the same reward, the sum of all of theirs: no advantage is left.
bool has_no_spread(const AnswerGroup& group);

void set_advantages(AnswerGroup& group, Advantage kind);

}  // namespace sluice
