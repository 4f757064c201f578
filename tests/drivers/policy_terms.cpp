// SPDX-License-Identifier: Apache-2.0
// For tests/test_rl_objectives.py: reads batches, a JSON object a line, and prints loss and gradient of the objective
// with respect to the log-probabilities, all in float64. A batch names an algorithm and settings as run files do, and
// holds for each response the lists logprobs, entropy, old, rollout, reference (or null) and its advantage; with a
// value head values, old_values and its reward instead, for which the advantages and the gradient of the values are
// printed too.
#include <iostream>
#include <nlohmann/json.hpp>

#include "sluice/rl/options.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

template <typename Enum>
Enum one_of(const Json& name, std::initializer_list<const char*> names) {
  int index = 0;
  for (const auto* each : names) {
    if (name == each) return static_cast<Enum>(index);
    ++index;
  }
  throw std::runtime_error("unknown name: " + name.dump());
}

std::vector<double> numbers(const Tensor& x) {
  const auto dense = x.contiguous();
  return {dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel()};
}

ObjectiveOptions options_of(const Json& batch) {
  ObjectiveOptions o;
  o.algorithm = one_of<Algorithm>(batch.at("algorithm"), {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo"});
  if (batch.contains("aggregation")) {
    o.aggregation = one_of<Aggregation>(batch.at("aggregation"),
                                        {"token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"});
  }
  if (batch.contains("dual_clip")) o.dual_clip = batch.at("dual_clip").get<double>();
  o.gamma = batch.value("gamma", 1.0);
  o.gae_lambda = batch.value("gae_lambda", 1.0);
  if (batch.contains("whiten")) o.whiten = batch.at("whiten").get<bool>();
  o.entropy_coef = batch.value("entropy_coef", 0.0);
  o.kl_coef = batch.value("kl_coef", 0.0);
  o.kl = one_of<KlEstimate>(batch.value("kl", "k3"), {"k1", "k2", "k3"});
  o.correction = one_of<Correction>(batch.value("correction", "none"),
                                    {"none", "token", "sequence", "token_mask", "sequence_mask"});
  return o;
}

Json solve(const Json& batch) {
  const auto& responses = batch.at("responses");
  std::vector<std::int64_t> lengths;
  for (const auto& r : responses) lengths.push_back(static_cast<std::int64_t>(r.at("logprobs").size()));
  const auto algorithm = algorithm_settings(options_of(batch));
  const auto weights = response_weights(lengths, algorithm.aggregation, batch.at("longest").get<std::int64_t>());
  const auto all = [&](const char* key) {
    std::vector<double> values;
    for (const auto& r : responses) {
      for (const auto& value : r.at(key)) values.push_back(value.get<double>());
    }
    return at::tensor(values, kDouble);
  };
  const bool gae = algorithm.advantage == Advantage::kGae;
  std::vector<std::vector<double>> advantages;
  std::vector<double> returns, token_weights;
  std::vector<std::int64_t> response;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const auto tokens = static_cast<std::size_t>(lengths[i]);
    if (gae) {
      std::vector<double> rewards(tokens, 0.0);
      rewards.back() = responses[i].at("reward").get<double>();
      const auto values = responses[i].at("old_values").get<std::vector<double>>();
      const auto found = generalized_advantages(rewards, values, algorithm.gae);
      advantages.push_back(found.advantages);
      returns.insert(returns.end(), found.returns.begin(), found.returns.end());
    } else {
      advantages.emplace_back(tokens, responses[i].at("advantage").get<double>());
    }
    token_weights.insert(token_weights.end(), tokens, weights[i]);
    response.insert(response.end(), tokens, static_cast<std::int64_t>(i));
  }
  if (algorithm.whiten) whiten(advantages);
  std::vector<double> flat;
  for (const auto& part : advantages) flat.insert(flat.end(), part.begin(), part.end());
  ObjectiveTokens tokens;
  tokens.logprobs = all("logprobs").requires_grad_();
  tokens.entropy = all("entropy").requires_grad_();
  tokens.old = all("old");
  tokens.rollout = all("rollout");
  if (batch.value("kl_coef", 0.0) > 0) tokens.reference = all("reference");
  if (gae) {
    tokens.values = all("values").requires_grad_();
    tokens.old_values = all("old_values");
    tokens.returns = at::tensor(returns, kDouble);
  }
  tokens.advantages = at::tensor(flat, kDouble);
  tokens.weights = at::tensor(token_weights, kDouble);
  tokens.response = at::tensor(response, kLong);
  tokens.responses = std::ssize(lengths);
  const auto loss = policy_objective(tokens, algorithm.objective).loss;
  loss.backward();
  Json printed{{"loss", loss.item<double>()}, {"gradient", numbers(tokens.logprobs.grad())}};
  if (algorithm.objective.entropy_coef > 0) printed["entropy_gradient"] = numbers(tokens.entropy.grad());
  if (gae) {
    printed["advantages"] = flat;
    printed["value_gradient"] = numbers(tokens.values.grad());
  }
  return printed;
}

}  // namespace
}  // namespace sluice

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << sluice::solve(nlohmann::json::parse(line)).dump() << "\n";
  }
}
