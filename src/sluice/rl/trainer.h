// SPDX-License-Identifier: Apache-2.0
// Reinforcement learning: the loop. The engine samples from the very parameters that the optimizer updates, so there is
// nothing to synchronise.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/core/error.h"
#include "sluice/core/metrics_file.h"
#include "sluice/core/progress.h"
#include "sluice/models/family.h"
#include "sluice/rl/evaluation.h"
#include "sluice/rl/policy.h"
#include "sluice/rl/rollout.h"
#include "sluice/train/setup.h"

namespace sluice {

// What a run has beside its options. All of it must outlive the trainer.
struct RlInputs {
  Model& model;              // loaded
  const Decoder* reference;  // of the KL divergence; null: none, or the model without its adapters
  Tokenizer tokenizer;
  std::vector<TokenId> stop_ids;
  const std::vector<Prompt>& prompts;
  const std::vector<Prompt>& eval_prompts;  // may be empty
  Rewards& rewards;
  Surroundings* surroundings;  // null: answers are single turns
  const std::optional<TrainingState>& state;
  const std::optional<TrainedAdapters>& adapters;
};

class RlTrainer {
 public:
  RlTrainer(const RlOptions& options, const RlInputs& inputs);

  // To the last step, or to the end of the step in which a signal asks to stop. A checkpoint stands at the end of both.
  // kRequeue after a signal.
  ExitCode run();

 private:
  struct Step;  // what is found out during one

  void sample(Step& step);
  std::int64_t longest_episode() const { return surroundings_ != nullptr ? options_.train.seq_len : 0; }
  std::vector<TrainedResponse> responses_of(const std::vector<AnswerGroup>& groups) const;
  void score(Step& step, std::vector<std::vector<TrainedResponse*>>& minibatches);
  void train(Step& step);
  void finish(Step& step);
  nlohmann::ordered_json evaluate_now(std::int64_t step);
  void save(std::int64_t step);

  const RlOptions& options_;
  const Model& model_;
  const Decoder* reference_;
  std::vector<Parameter*> adapted_;  // of the model, where it has adapters
  nlohmann::json adapters_;          // what a checkpoint says of them; null: the model is trained
  const std::vector<Prompt>& prompts_;
  const std::vector<Prompt>& eval_prompts_;
  Rewards& rewards_;
  Surroundings* surroundings_;
  AlgorithmSettings algorithm_;
  std::unique_ptr<ValueHead> value_head_;  // null: advantages come from groups
  PromptStream stream_;
  std::vector<Parameter*> parameters_;
  GradientSum gradients_;
  AdamW optimizer_;
  Schedule schedule_;
  Engine engine_;
  Policy policy_;
  std::int64_t first_step_;
  std::uint64_t streams_ = 0;    // random streams used by answers so far
  std::int64_t updates_ = 0;     // optimizer steps since the run began
  std::int64_t idle_steps_ = 0;  // in a row that changed nothing
  MetricsFile metrics_;
  CheckpointWriter checkpoints_;
  Progress progress_;
  std::chrono::steady_clock::time_point begin_;  // of the first step in this process
};

}  // namespace sluice
