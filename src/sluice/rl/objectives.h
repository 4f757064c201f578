// SPDX-License-Identifier: Apache-2.0
// What reinforcement learning minimises, as functions of log-probabilities. Everything is a tensor over the scored
// tokens: T tokens of R responses, one response behind the other, each whole. A token's log-probability is that of the
// distribution it was drawn from, so at the sampling temperature.
//
// Four policies: `logprobs` (with gradient) of the weights being trained, `old` of those at the beginning of the step,
// `rollout` as the sampler reported them, `reference` of a frozen model.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

enum class PolicyObjective {
  kClip,   // PPO's clipped ratio (Schulman et al. 2017), of each token: GRPO (Shao et al. 2024), DAPO, Dr. GRPO
  kGspo,   // the same with one ratio a response, the geometric mean of its tokens' (Zheng et al. 2025)
  kCispo,  // the clipped ratio as a constant weight of the log-probability (MiniMax-M1, 2025)
};

struct ClipRange {
  double low = 0.2, high = 0.2;     // the ratio is kept to [1 - low, 1 + high]
  std::optional<double> dual = {};  // with a negative advantage the loss is at most -dual * advantage (Ye et al. 2019)
};

struct PolicyLoss {
  Tensor loss;                             // [T] with gradient
  Tensor clipped_low, clipped_high, dual;  // [T] bool: the token's gradient was cut by that bound
};

// max(-r A, -clip(r) A) with r = exp(log_ratio); the exponent is kept to +-20.
PolicyLoss clipped_loss(const Tensor& log_ratio, const Tensor& advantages, const ClipRange& range);

// -constant(clip(r)) A logprobs.
PolicyLoss cispo_loss(const Tensor& logprobs, const Tensor& log_ratio, const Tensor& advantages,
                      const ClipRange& range);

// The mean over each response of what its tokens have, for each of its tokens. `response` [T] int64: 0 to responses
// - 1.
Tensor response_mean(const Tensor& values, const Tensor& response, std::int64_t responses);

// Estimates of KL(policy || reference) of each token from x = logprobs - reference (Schulman 2020, "Approximating KL
// divergence"): k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1. The exponent is kept to +-20, k3 to at most 10.
enum class KlEstimate { kK1, kK2, kK3 };
Tensor kl_estimate(const Tensor& logprobs, const Tensor& reference, KlEstimate kind);

// How the difference between the policy that sampled and the one that is trained from is corrected for: constants that
// multiply the tokens' losses, from w = exp(old - rollout), exponents kept to +-20.
enum class Correction {
  kNone,
  kToken,         // min(w, high)
  kSequence,      // min(product of w over the response, high)
  kTokenMask,     // w inside [low, high], otherwise 0
  kSequenceMask,  // the product inside [low, high], otherwise 0
};
struct CorrectionRange {
  double low = 0.5, high = 2;
};
Tensor correction_weights(const Tensor& old, const Tensor& rollout, const Tensor& response, std::int64_t responses,
                          Correction kind, const CorrectionRange& range);

struct ValueLoss {
  Tensor loss;     // [T] with gradient
  Tensor clipped;  // [T] bool: the bound decides
};

// max((V - R)^2, (clip(V) - R)^2) / 2, where clip keeps V to `range` around the value before the step (the PPO of
// OpenAI's baselines; Engstrom et al. 2020).
ValueLoss value_loss(const Tensor& values, const Tensor& old, const Tensor& returns, double range);

// What one pack contributes. All [T] but `response`.
struct ObjectiveTokens {
  Tensor logprobs;  // with gradient
  Tensor entropy;   // with gradient where it is rewarded
  Tensor old, rollout;
  Tensor reference;  // undefined: no KL
  Tensor values;     // with gradient; undefined: there is no value head
  Tensor old_values, returns;
  Tensor advantages;
  Tensor weights;   // of each token in the step's loss: response_weights()
  Tensor response;  // int64, 0 to responses - 1
  std::int64_t responses;
};

struct ObjectiveSettings {
  PolicyObjective policy = PolicyObjective::kClip;
  ClipRange clip = {};
  double value_coef = 0.1, value_clip = 0.2;
  double entropy_coef = 0;
  double kl_coef = 0;
  KlEstimate kl = KlEstimate::kK3;
  Correction correction = Correction::kNone;
  CorrectionRange correction_range = {};
};

struct PolicyTerms {
  // Scalar, with gradient: sum of weights (correction * policy's loss + value_coef * value's loss + kl_coef * kl -
  // entropy_coef * entropy).
  Tensor loss;
  PolicyLoss policy;      // of each token
  ValueLoss value;        // of each token; undefined without a value head
  Tensor correction, kl;  // [T]; kl is 0 without a reference
};

PolicyTerms policy_objective(const ObjectiveTokens& tokens, const ObjectiveSettings& settings);

// How a step's tokens become one number. N counted tokens and S responses of the whole optimizer step, n tokens of the
// response:
enum class Aggregation {
  kTokenMean,         // 1 / N: DAPO
  kSequenceMean,      // 1 / (S n), the mean over responses of their means: GRPO, GSPO
  kSequenceSum,       // 1 / S
  kSequenceSumFixed,  // 1 / (S longest), whatever the lengths: Dr. GRPO (Liu et al. 2025)
};

// The weight of each of a response's tokens. `lengths`: counted tokens of each response of the step; a response that is
// masked has 0 and still counts in S. `longest`: the limit of a response's length.
std::vector<double> response_weights(std::span<const std::int64_t> lengths, Aggregation aggregation,
                                     std::int64_t longest);

}  // namespace sluice
