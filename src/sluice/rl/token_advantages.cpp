// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/token_advantages.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sluice {
namespace {

std::vector<double> numbers(const Tensor& x) {
  const auto dense = x.to(kDouble).contiguous();
  const auto* data = dense.const_data_ptr<double>();
  return {data, data + dense.numel()};
}

// The reward is earned with the last token; each token pays for its divergence from the reference, in the estimate k1.
std::vector<double> token_rewards(const TrainedResponse& response, double kl_coef) {
  std::vector<double> rewards(static_cast<std::size_t>(response.tokens()), 0.0);
  if (kl_coef > 0) {
    rewards = numbers(-kl_coef *
                      kl_estimate(response.old_logprobs, response.reference_logprobs, KlEstimate::kK1).to(kDouble));
  }
  rewards.back() += response.reward;
  return rewards;
}

double mean_of(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

AdvantageStats set_token_advantages(const std::vector<TrainedResponse*>& responses, const AlgorithmSettings& settings) {
  std::vector<std::vector<double>> counted;  // advantages, a response each
  std::vector<double> values, returns;       // of the same
  for (auto* response : responses) {
    response->advantages = at::full({response->tokens()}, response->group_advantage, kFloat);
    if (settings.advantage == Advantage::kGae) {
      const auto own_values = numbers(response->old_values);
      const auto found =
          generalized_advantages(token_rewards(*response, settings.reward_kl_coef), own_values, settings.gae);
      response->advantages = at::tensor(found.advantages, kFloat);
      response->returns = at::tensor(found.returns, kFloat);
      if (response->counted) {
        values.insert(values.end(), own_values.begin(), own_values.end());
        returns.insert(returns.end(), found.returns.begin(), found.returns.end());
      }
    }
    if (response->counted) counted.push_back(numbers(response->advantages));
  }
  if (settings.whiten) {
    whiten(counted);
    auto next = counted.begin();
    for (auto* response : responses) {
      if (response->counted) response->advantages = at::tensor(*next++, kFloat);
    }
  }
  std::vector<double> all;
  for (const auto& part : counted) all.insert(all.end(), part.begin(), part.end());
  AdvantageStats stats{.advantage_mean = mean_of(all),
                       .value_mean = mean_of(values),
                       .return_mean = mean_of(returns),
                       .explained_variance = explained_variance(values, returns)};
  for (const auto advantage : all) stats.advantage_max = std::max(stats.advantage_max, std::abs(advantage));
  return stats;
}

}  // namespace sluice
