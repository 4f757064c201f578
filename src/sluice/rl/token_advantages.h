// SPDX-License-Identifier: Apache-2.0
// From what answers are worth to the advantages of their tokens.
#pragma once

#include <vector>

#include "sluice/rl/policy.h"

namespace sluice {

// Of the counted tokens of a step.
struct AdvantageStats {
  double advantage_mean = 0, advantage_max = 0;                    // the second of their sizes
  double value_mean = 0, return_mean = 0, explained_variance = 0;  // before the step; with a value head
};

// Fills in `advantages` of all of a step's responses, and with kGae their `returns`: from reward or group_advantage,
// with kGae also from old_values, and with a KL coefficient from old_logprobs and reference_logprobs. Whitening looks
// at counted responses alone.
AdvantageStats set_token_advantages(const std::vector<TrainedResponse*>& responses, const AlgorithmSettings& settings);

}  // namespace sluice
