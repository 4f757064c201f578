// SPDX-License-Identifier: Apache-2.0
// How well a model answers held-out prompts.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "sluice/rl/rollout.h"

namespace sluice {

// The chance that at least one of k answers, drawn without repetition from n of which `right` are right, is right:
// 1 - C(n - right, k) / C(n, k) (Chen et al. 2021).
double pass_at_k(std::int64_t n, std::int64_t right, std::int64_t k);

// Samples and judges answers to all prompts; by names as metrics.jsonl has them. avg@n: the mean of the first reward
// over the n answers and the prompts. pass@k for k = 1, 2, 4, .. up to n; right is a first reward of at least 1. Means
// are over prompts with an answer that could be judged; "failed" counts the answers that could not. `surroundings` as
// sample_groups takes them.
nlohmann::ordered_json evaluate(Engine& engine, const std::vector<Prompt>& prompts, Rewards& rewards,
                                Surroundings* surroundings, const GenerationSettings& settings);

}  // namespace sluice
