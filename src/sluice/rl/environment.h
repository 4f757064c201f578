// SPDX-License-Identifier: Apache-2.0
// Episodes of several turns: the model answers, an environment says something to that and what it is worth, the model
// goes on. The environment is a Python class in child processes (worker.h); one object of it is one episode.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/data/chat_template.h"
#include "sluice/rl/prompts.h"
#include "sluice/rl/worker.h"

namespace sluice {

class Environment {
 public:
  // Starts the processes and waits until they are ready. Usage error if they cannot be.
  explicit Environment(const EnvironmentOptions& options);

  // The number of a new episode for each prompt; none where the environment failed, which is logged.
  std::vector<std::optional<std::int64_t>> begin(std::span<const Prompt* const> prompts);

  struct Turn {
    std::int64_t episode;
    std::string completion;  // text of the model's turn
  };
  struct Outcome {
    std::string observation;  // what the model reads next; of no use when done
    double reward;            // finite
    bool done;
  };
  // One turn of each of these episodes; none where the environment failed, which is logged and ends the episode.
  std::vector<std::optional<Outcome>> step(std::span<const Turn> turns);

  void end(std::span<const std::int64_t> episodes);  // that are not done

  std::int64_t max_turns() const { return max_turns_; }
  std::int64_t failures() const { return failures_; }
  const std::string& last_failure() const { return last_failure_; }

 private:
  using Json = nlohmann::ordered_json;
  std::vector<std::optional<Json>> ask(std::vector<Json> requests);
  void fail(const Json& request, const std::string& why);

  std::vector<std::string> command_;
  WorkerLimits limits_;
  std::int64_t max_turns_;
  std::vector<std::unique_ptr<Worker>> workers_;  // an episode's is that of its number, modulo their count
  std::int64_t next_episode_ = 0;
  std::int64_t failures_ = 0;
  std::string last_failure_;
};

// What stands between two turns of the model: the end of its turn, a user's message with what the environment said, and
// the header of the next turn, as the chat template writes them. Without a chat: what was said, as it is.
class TurnGlue {
 public:
  TurnGlue(const std::filesystem::path& model_folder, const PromptOptions& options);

  // Behind a turn whose last token is `last`: the token that ends a turn is left out where it is that. Data error if
  // the template does not end turns with a control token.
  std::vector<TokenId> between(TokenId last, const std::string& observation) const;
  std::string decode(std::span<const TokenId> tokens) const { return encoder_.tokenizer().decode(tokens); }

 private:
  PromptOptions options_;
  ChatTemplate template_;
  ChatEncoder encoder_;
};

}  // namespace sluice
