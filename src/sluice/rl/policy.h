// SPDX-License-Identifier: Apache-2.0
// Answers as the trainer sees them: packed behind their prompts, scored by the model, and one optimizer step down the
// objective.
#pragma once

#include <cstdint>
#include <vector>

#include "sluice/data/packing.h"
#include "sluice/layers/choices.h"
#include "sluice/layers/lora.h"
#include "sluice/models/decoder.h"
#include "sluice/rl/options.h"
#include "sluice/rl/value_head.h"
#include "sluice/train/adamw.h"
#include "sluice/train/update.h"

namespace sluice {

// One answer behind its prompt. Everything of its n tokens is [n] float32 on the CPU.
struct TrainedResponse {
  Sample sample;                   // prompt and answer; the answer is what is trained
  Tensor rollout_logprobs;         // as the sampler reported them
  Tensor old_logprobs = {};        // before the step; undefined: those of the training pass itself
  Tensor reference_logprobs = {};  // undefined: no KL
  Choices experts = {};            // as Completion::experts; none: routers choose anew
  Choices key_blocks = {};         // as Completion::key_blocks; none: indexers choose anew
  double reward = 0;
  double group_advantage = 0;            // within its group; 0 with a value head
  Tensor old_values = {};                // before the step; undefined: there is no value head
  Tensor advantages = {}, returns = {};  // rl/token_advantages.h; returns only with a value head
  bool counted = true;                   // false: masked, but one of the step's responses

  std::int64_t tokens() const { return rollout_logprobs.size(0); }
};

// The policy that a sampler draws from: softmax(logits / temperature) over the first `vocabulary` ids.
struct Policy {
  const Decoder& decoder;
  double temperature;
  std::int64_t vocabulary;
  const ValueHead* value_head = nullptr;  // null: there is none
};

struct ReplayCoverage {
  std::int64_t tokens = 0;   // that went through routers while sampling: all but the last one of each response
  std::int64_t missing = 0;  // of these, where some block has no choice of experts: those go anew
};

// Of these responses. `strict`: error for a token that is missing; otherwise nothing is counted where none has experts.
ReplayCoverage check_replay(const std::vector<TrainedResponse>& responses, bool strict);

// Packs of whole responses, each at most seq_len tokens; they hold their places in `responses`.
std::vector<PackedBatch> pack_responses(const std::vector<TrainedResponse*>& responses, std::int64_t seq_len);

struct ResponseScores {
  Tensor logprobs, values;  // [n] float32 on the CPU; values undefined without a value head
};

// Of every answer's tokens, without gradient, in the order of `responses`. `replay`: through the experts and key blocks
// that they were sampled with, where those are known.
std::vector<ResponseScores> score_responses(const Policy& policy, const std::vector<TrainedResponse*>& responses,
                                            const std::vector<PackedBatch>& packs, bool replay);

// Sums over counted tokens, and extremes.
struct PolicyStats {
  double tokens = 0, loss = 0, policy_loss = 0, kl = 0, entropy = 0;
  double value_loss = 0, value_clipped = 0;
  double clipped_low = 0, clipped_high = 0, dual = 0;
  double old_minus_new = 0, ratio_max = 0;                            // of log-probabilities; of their ratio
  double mismatch = 0, mismatch_max = 0, mismatch_kl = 0;             // between rollout and old
  double correction = 0, correction_square = 0, correction_zero = 0;  // weights, their squares, how many are 0
  double correction_max = 0;
  double routed = 0, rerouted = 0;    // tokens times blocks whose experts were replayed; that would have gone elsewhere
  double indexed = 0, reindexed = 0;  // the same of key blocks
  void add(const PolicyStats& other);
};

struct PolicyUpdate {
  PolicyStats stats;
  double grad_norm = 0;
  bool skipped = false;  // no token was counted; nothing changed
};

// One optimizer step over these responses, which are all that its denominators count. `longest`: the limit of an
// answer's length. NaN error, before anything is updated, if loss or gradients are not finite.
PolicyUpdate update_policy(const Policy& policy, const AlgorithmSettings& algorithm,
                           const std::vector<TrainedResponse*>& responses, std::int64_t seq_len, std::int64_t longest,
                           GradientSum& gradients, AdamW& optimizer, const UpdateSettings& settings);

}  // namespace sluice
