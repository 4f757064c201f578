// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/objectives.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "sluice/rl/advantages.h"

namespace sluice {
namespace {

// Three responses of 3, 1 and 4 tokens, with ratios on both sides of every bound and advantages of both signs.
struct Recorded {
  std::vector<double> logprobs{-1.0, -0.4, -2.0, -0.1, -3.0, -0.7, -1.2, -0.9};
  std::vector<double> old{-1.3, -0.4, -1.5, -0.6, -1.0, -0.71, -1.2, -2.4};
  std::vector<double> advantages{1.5, 1.5, 1.5, -0.7, -1.1, -1.1, -1.1, -1.1};
  std::vector<std::int64_t> response{0, 0, 0, 1, 2, 2, 2, 2};
  std::size_t size() const { return logprobs.size(); }
};

Tensor tensor(const std::vector<double>& values) { return at::tensor(values, kDouble); }

// d/dx of f at `at` in each coordinate, by central differences: the remainder is of order 1e-10 where f is smooth.
std::vector<double> slope(const std::function<double(const std::vector<double>&)>& f, std::vector<double> at) {
  constexpr double kStep = 1e-5;
  std::vector<double> slopes;
  for (auto& x : at) {
    const double middle = x;
    x = middle + kStep;
    const double above = f(at);
    x = middle - kStep;
    slopes.push_back((above - f(at)) / (2 * kStep));
    x = middle;
  }
  return slopes;
}

double clipped(double ratio, double advantage, const ClipRange& range) {
  const double inside = std::min(std::max(ratio, 1 - range.low), 1 + range.high);
  double loss = -std::min(ratio * advantage, inside * advantage);
  if (range.dual && advantage < 0) loss = std::min(loss, -*range.dual * advantage);
  return loss;
}

// The definitions again, in loops over plain numbers.
double clip_objective(const std::vector<double>& logprobs, const Recorded& r, const ClipRange& range) {
  double sum = 0;
  for (std::size_t t = 0; t < r.size(); ++t) sum += clipped(std::exp(logprobs[t] - r.old[t]), r.advantages[t], range);
  return sum;
}

double gspo_objective(const std::vector<double>& logprobs, const Recorded& r, const ClipRange& range) {
  double sum = 0;
  for (std::size_t t = 0; t < r.size(); ++t) {
    double mean = 0, count = 0;
    for (std::size_t u = 0; u < r.size(); ++u) {
      if (r.response[u] != r.response[t]) continue;
      mean += logprobs[u] - r.old[u];
      ++count;
    }
    sum += clipped(std::exp(mean / count), r.advantages[t], range);
  }
  return sum;
}

void expect_close(const Tensor& got, const std::vector<double>& want, double bound) {
  ASSERT_EQ(got.numel(), std::ssize(want));
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(got[static_cast<std::int64_t>(i)].item<double>(), want[i], bound) << i;
  }
}

TEST(ClippedLoss, IsPpoAndItsSlope) {
  const Recorded r;
  for (const auto& range : {ClipRange{.low = 0.2, .high = 0.2}, ClipRange{.low = 0.2, .high = 0.28},
                            ClipRange{.low = 0.2, .high = 0.2, .dual = 3}}) {
    const auto logprobs = tensor(r.logprobs).requires_grad_();
    const auto loss = clipped_loss(logprobs - tensor(r.old), tensor(r.advantages), range).loss.sum();
    EXPECT_NEAR(loss.item<double>(), clip_objective(r.logprobs, r, range), 1e-12);
    const auto gradient = torch::autograd::grad({loss}, {logprobs})[0];
    expect_close(gradient, slope([&](const auto& x) { return clip_objective(x, r, range); }, r.logprobs), 1e-8);
  }
}

TEST(ClippedLoss, TellsWhichBoundCutsAGradient) {
  const auto ratio = tensor({1.5, 1.5, 0.5, 0.5, 5.0});
  const auto found = clipped_loss(ratio.log(), tensor({1, -1, 1, -1, -1}), {.low = 0.2, .high = 0.2, .dual = 3});
  const auto bools = [](const std::vector<std::int64_t>& values) { return at::tensor(values, kLong).to(at::kBool); };
  EXPECT_TRUE(found.clipped_high.equal(bools({1, 0, 0, 0, 0})));
  EXPECT_TRUE(found.clipped_low.equal(bools({0, 0, 0, 1, 0})));
  EXPECT_TRUE(found.dual.equal(bools({0, 0, 0, 0, 1})));
  EXPECT_DOUBLE_EQ(found.loss[4].item<double>(), 3);
}

TEST(ClippedLoss, ExtremeRatiosStayFinite) {
  const auto log_ratio = tensor({1000, -1000}).requires_grad_();
  const auto loss = clipped_loss(log_ratio, tensor({-1, -1}), {}).loss.sum();
  EXPECT_TRUE(loss.isfinite().item<bool>());
  EXPECT_TRUE(torch::autograd::grad({loss}, {log_ratio})[0].isfinite().all().item<bool>());
}

TEST(Gspo, HasOneRatioAResponse) {
  const Recorded r;
  const ClipRange range{.low = 3e-4, .high = 4e-4};
  const auto logprobs = tensor(r.logprobs).requires_grad_();
  const auto ratio = response_mean(logprobs - tensor(r.old), at::tensor(r.response, kLong), 3);
  const auto loss = clipped_loss(ratio, tensor(r.advantages), range).loss.sum();
  EXPECT_NEAR(loss.item<double>(), gspo_objective(r.logprobs, r, range), 1e-12);
  expect_close(torch::autograd::grad({loss}, {logprobs})[0],
               slope([&](const auto& x) { return gspo_objective(x, r, range); }, r.logprobs), 1e-8);
}

TEST(Cispo, WeightsTheLogProbabilityByTheClippedRatio) {
  const Recorded r;
  const ClipRange range{.low = 1, .high = 0.3};
  const auto logprobs = tensor(r.logprobs).requires_grad_();
  const auto loss = cispo_loss(logprobs, logprobs - tensor(r.old), tensor(r.advantages), range).loss.sum();
  double value = 0;
  std::vector<double> gradient;
  for (std::size_t t = 0; t < r.size(); ++t) {
    const double weight = std::min(std::exp(r.logprobs[t] - r.old[t]), 1.3);
    gradient.push_back(-weight * r.advantages[t]);
    value += gradient.back() * r.logprobs[t];
  }
  EXPECT_NEAR(loss.item<double>(), value, 1e-12);
  expect_close(torch::autograd::grad({loss}, {logprobs})[0], gradient, 1e-12);
}

// Why the loss in the log is near 0: advantages of a group have mean 0, and every ratio of a first update is 1. Not so
// where a long answer counts for more.
TEST(PolicyObjective, IsZeroOverAGroupBeforeTheFirstUpdateAndItsGradientIsNot) {
  const Recorded r;
  const auto by_answer = group_advantages(std::vector{1.0, 0.0, 0.2}, Advantage::kGroup);
  const std::vector<std::int64_t> lengths{3, 1, 4};
  const auto response = at::tensor(r.response, kLong);
  const auto loss_and_gradient = [&](Aggregation aggregation) {
    const auto logprobs = tensor(r.logprobs).requires_grad_(), old = tensor(r.logprobs);
    const auto weights = tensor(response_weights(lengths, aggregation, 10)).index_select(0, response);
    const auto loss = policy_objective({.logprobs = logprobs,
                                        .entropy = {},
                                        .old = old,
                                        .rollout = old,
                                        .reference = {},
                                        .values = {},
                                        .old_values = {},
                                        .returns = {},
                                        .advantages = tensor(by_answer).index_select(0, response),
                                        .weights = weights,
                                        .response = response,
                                        .responses = 3},
                                       {})
                          .loss;
    return std::pair(loss.item<double>(), torch::autograd::grad({loss}, {logprobs})[0]);
  };
  const auto [loss, gradient] = loss_and_gradient(Aggregation::kSequenceMean);
  EXPECT_NEAR(loss, 0, 1e-15);
  EXPECT_DOUBLE_EQ(gradient[0].item<double>(), -by_answer[0] / 9);
  EXPECT_NEAR(loss_and_gradient(Aggregation::kTokenMean).first,
              -(3 * by_answer[0] + by_answer[1] + 4 * by_answer[2]) / 8, 1e-15);
}

TEST(KlEstimate, HasTheValuesOfItsDefinition) {
  const auto at_half = [](KlEstimate kind) { return kl_estimate(tensor({-1.0}), tensor({-0.5}), kind).item<double>(); };
  EXPECT_DOUBLE_EQ(at_half(KlEstimate::kK1), -0.5);
  EXPECT_DOUBLE_EQ(at_half(KlEstimate::kK2), 0.125);
  EXPECT_NEAR(at_half(KlEstimate::kK3), std::exp(0.5) - 1.5, 1e-15);
  // Slopes in x = logprobs - reference = -0.5: 1, x, 1 - exp(-x).
  for (const auto& [kind, want] :
       {std::pair{KlEstimate::kK1, 1.0}, {KlEstimate::kK2, -0.5}, {KlEstimate::kK3, 1 - std::exp(0.5)}}) {
    const auto logprobs = tensor({-1.0}).requires_grad_();
    const auto kl = kl_estimate(logprobs, tensor({-0.5}), kind);
    EXPECT_NEAR(torch::autograd::grad({kl.sum()}, {logprobs})[0].item<double>(), want, 1e-15);
  }
}

TEST(KlEstimate, StaysFiniteFarAway) {
  EXPECT_EQ(kl_estimate(tensor({-500}), tensor({-1}), KlEstimate::kK3).item<double>(), 10);
}

TEST(CorrectionWeights, FollowTheirTable) {
  const auto rollout = at::zeros({5}, kDouble);
  const auto old = tensor({0.2, 0.2, 0.9, -0.9, 0.0});  // two responses: sums 0.4 and 0.0
  const auto response = at::tensor(std::vector<std::int64_t>{0, 0, 1, 1, 1}, kLong);
  const auto weights = [&](Correction kind) {
    return correction_weights(old, rollout, response, 2, kind, {.low = 0.5, .high = 1.3});
  };
  expect_close(weights(Correction::kNone), {1, 1, 1, 1, 1}, 0);
  expect_close(weights(Correction::kToken), {std::exp(0.2), std::exp(0.2), 1.3, std::exp(-0.9), 1}, 1e-15);
  expect_close(weights(Correction::kSequence), {1.3, 1.3, 1, 1, 1}, 1e-15);
  expect_close(weights(Correction::kTokenMask), {std::exp(0.2), std::exp(0.2), 0, 0, 1}, 1e-15);
  expect_close(weights(Correction::kSequenceMask), {0, 0, 1, 1, 1}, 1e-15);
}

TEST(ValueLoss, IsTheLargerOfTwoSquaresAndItsSlope) {
  const std::vector<double> values{1.0, 1.1, 1.5, 1.5, 0.2}, old{1, 1, 1, 1, 1}, returns{2, 0.5, 2, 1, 0};
  const auto definition = [&](const std::vector<double>& v) {
    double sum = 0;
    for (std::size_t t = 0; t < v.size(); ++t) {
      const double near = std::min(std::max(v[t], old[t] - 0.2), old[t] + 0.2);
      sum += std::max((v[t] - returns[t]) * (v[t] - returns[t]), (near - returns[t]) * (near - returns[t])) / 2;
    }
    return sum;
  };
  const auto v = tensor(values).requires_grad_();
  const auto found = value_loss(v, tensor(old), tensor(returns), 0.2);
  EXPECT_NEAR(found.loss.sum().item<double>(), definition(values), 1e-15);
  expect_close(torch::autograd::grad({found.loss.sum()}, {v})[0], slope(definition, values), 1e-8);
  // Past the bound on the way to the return nothing pulls any more; past it on the wrong side the whole error does.
  EXPECT_TRUE(found.clipped.equal(at::tensor({0, 0, 1, 0, 1}, kLong).to(at::kBool)));
}

TEST(ResponseWeights, CountTheWholeStep) {
  const std::vector<std::int64_t> lengths{3, 0, 1};  // the second is masked
  const auto weights = [&](Aggregation kind) { return response_weights(lengths, kind, 10); };
  EXPECT_EQ(weights(Aggregation::kTokenMean), (std::vector<double>{1.0 / 4, 0, 1.0 / 4}));
  EXPECT_EQ(weights(Aggregation::kSequenceMean), (std::vector<double>{1.0 / 9, 0, 1.0 / 3}));
  EXPECT_EQ(weights(Aggregation::kSequenceSum), (std::vector<double>{1.0 / 3, 0, 1.0 / 3}));
  EXPECT_EQ(weights(Aggregation::kSequenceSumFixed), (std::vector<double>{1.0 / 30, 0, 1.0 / 30}));
}

}  // namespace
}  // namespace sluice
