// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/objectives.h"

#include <algorithm>
#include <numeric>

namespace sluice {
namespace {

constexpr double kLargestExponent = 20, kLargestK3 = 10;

Tensor clamped_exp(const Tensor& x) { return x.clamp(-kLargestExponent, kLargestExponent).exp(); }

Tensor response_sum(const Tensor& values, const Tensor& response, std::int64_t responses) {
  return at::zeros({responses}, values.options()).index_add(0, response, values);
}

}  // namespace

PolicyLoss clipped_loss(const Tensor& log_ratio, const Tensor& advantages, const ClipRange& range) {
  const auto ratio = clamped_exp(log_ratio);
  const auto free = -ratio * advantages, bound = -ratio.clamp(1 - range.low, 1 + range.high) * advantages;
  auto loss = at::maximum(free, bound);
  auto dual = at::zeros_like(advantages, at::kBool);
  if (range.dual) {
    const auto limit = -*range.dual * advantages;
    dual = (advantages < 0) & (loss > limit);
    loss = at::where(dual, limit, loss);
  }
  return {.loss = loss,
          .clipped_low = (ratio < 1 - range.low) & (advantages < 0),
          .clipped_high = (ratio > 1 + range.high) & (advantages > 0),
          .dual = dual};
}

PolicyLoss cispo_loss(const Tensor& logprobs, const Tensor& log_ratio, const Tensor& advantages,
                      const ClipRange& range) {
  const auto ratio = clamped_exp(log_ratio).detach();
  return {.loss = -ratio.clamp(1 - range.low, 1 + range.high) * advantages * logprobs,
          .clipped_low = ratio<1 - range.low, .clipped_high = ratio> 1 + range.high,
          .dual = at::zeros_like(advantages, at::kBool)};
}

Tensor response_mean(const Tensor& values, const Tensor& response, std::int64_t responses) {
  const auto lengths = response_sum(at::ones_like(values), response, responses);
  return (response_sum(values, response, responses) / lengths).index_select(0, response);
}

Tensor kl_estimate(const Tensor& logprobs, const Tensor& reference, KlEstimate kind) {
  auto x = logprobs - reference;
  if (kind == KlEstimate::kK1) return x;
  if (kind == KlEstimate::kK2) return x * x / 2;
  return (clamped_exp(-x) + x - 1).clamp_max(kLargestK3);
}

Tensor correction_weights(const Tensor& old, const Tensor& rollout, const Tensor& response, std::int64_t responses,
                          Correction kind, const CorrectionRange& range) {
  if (kind == Correction::kNone) return at::ones_like(rollout);
  auto log_weight = (old - rollout).detach();
  if (kind == Correction::kSequence || kind == Correction::kSequenceMask) {
    log_weight = response_sum(log_weight, response, responses).index_select(0, response);
  }
  const auto weight = clamped_exp(log_weight);
  if (kind == Correction::kToken || kind == Correction::kSequence) return weight.clamp_max(range.high);
  return weight.masked_fill((weight < range.low) | (weight > range.high), 0);
}

ValueLoss value_loss(const Tensor& values, const Tensor& old, const Tensor& returns, double range) {
  const auto near = old + (values - old).clamp(-range, range);
  const auto free = (values - returns).square(), bound = (near - returns).square();
  return {.loss = at::maximum(free, bound) / 2, .clipped = bound > free};
}

PolicyTerms policy_objective(const ObjectiveTokens& t, const ObjectiveSettings& settings) {
  auto log_ratio = t.logprobs - t.old;
  if (settings.policy == PolicyObjective::kGspo) log_ratio = response_mean(log_ratio, t.response, t.responses);
  PolicyTerms found{.loss = {},
                    .policy = settings.policy == PolicyObjective::kCispo
                                  ? cispo_loss(t.logprobs, log_ratio, t.advantages, settings.clip)
                                  : clipped_loss(log_ratio, t.advantages, settings.clip),
                    .value = {},
                    .correction = correction_weights(t.old, t.rollout, t.response, t.responses, settings.correction,
                                                     settings.correction_range),
                    .kl = at::zeros_like(t.old)};
  auto loss = found.policy.loss * found.correction;
  if (settings.entropy_coef > 0) loss = loss - settings.entropy_coef * t.entropy;
  if (t.values.defined()) {
    found.value = value_loss(t.values, t.old_values, t.returns, settings.value_clip);
    loss = loss + settings.value_coef * found.value.loss;
  }
  if (t.reference.defined()) {
    found.kl = kl_estimate(t.logprobs, t.reference, settings.kl);
    loss = loss + settings.kl_coef * found.kl;
  }
  found.loss = (loss * t.weights).sum();
  return found;
}

std::vector<double> response_weights(std::span<const std::int64_t> lengths, Aggregation aggregation,
                                     std::int64_t longest) {
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const auto responses = static_cast<double>(lengths.size());
  std::vector<double> weights;
  for (const auto length : lengths) {
    const auto inverse = [&](double divisor) { return length == 0 ? 0 : 1 / divisor; };
    switch (aggregation) {
      case Aggregation::kTokenMean:
        weights.push_back(inverse(static_cast<double>(tokens)));
        break;
      case Aggregation::kSequenceMean:
        weights.push_back(inverse(responses * static_cast<double>(length)));
        break;
      case Aggregation::kSequenceSum:
        weights.push_back(inverse(responses));
        break;
      case Aggregation::kSequenceSumFixed:
        weights.push_back(inverse(responses * static_cast<double>(longest)));
        break;
    }
  }
  return weights;
}

}  // namespace sluice
