// SPDX-License-Identifier: Apache-2.0
// What answers are worth: the weighted sum of a run's rewards.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/rl/judge.h"
#include "sluice/rl/options.h"
#include "sluice/rl/prompts.h"

namespace sluice {

struct AnsweredPrompt {
  const Prompt* prompt;
  std::string completion;                     // text
  std::int64_t tokens;                        // of the completion, sampled ones
  std::optional<double> episode_reward = {};  // an environment's; none: it failed
};

struct Verdict {
  std::vector<double> parts;  // of each reward of the run, unweighted
  double reward;              // their weighted sum
};

class Rewards {
 public:
  // `max_tokens`: of an answer. Usage error for a reward whose settings do not fit its kind, or for none at all.
  Rewards(const std::vector<RewardOptions>& options, std::int64_t max_tokens);

  // Data error with its place for a prompt whose answer the rewards cannot use.
  void check(const std::vector<Prompt>& prompts) const;

  // In the order of the answers; none for one that a process could not judge, retries included, or the environment.
  // That is never a reward of 0.
  std::vector<std::optional<Verdict>> judge(std::span<const AnsweredPrompt> answers);

  std::int64_t failures() const;     // of judging processes, all tries so far
  std::string last_failure() const;  // empty: none

 private:
  using Rule = std::function<std::optional<double>(const AnsweredPrompt&)>;
  struct Part {
    RewardKind kind;
    double weight;
    Rule rule;                     // or
    std::unique_ptr<Judge> judge;  // a process
  };
  std::vector<Part> parts_;
};

}  // namespace sluice
