// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/options.h"

namespace sluice {
namespace {

// The papers' values; CISPO's bounds as ScaleRL (Khatri et al. 2025) has them: none below, 5 above.
AlgorithmSettings defaults_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kDapo:
      return {Advantage::kGroup, Aggregation::kTokenMean, {.clip = {.low = 0.2, .high = 0.28}}};
    case Algorithm::kDrGrpo:
      return {Advantage::kGroupMean, Aggregation::kSequenceSumFixed, {}};
    case Algorithm::kGspo:
      return {Advantage::kGroup,
              Aggregation::kSequenceMean,
              {.policy = PolicyObjective::kGspo, .clip = {.low = 3e-4, .high = 4e-4}}};
    case Algorithm::kCispo:
      return {Advantage::kGroup,
              Aggregation::kTokenMean,
              {.policy = PolicyObjective::kCispo, .clip = {.low = 1, .high = 4}}};
    case Algorithm::kPpo:
      return {Advantage::kGae, Aggregation::kTokenMean, {}};
    default:
      return {Advantage::kGroup, Aggregation::kSequenceMean, {}};
  }
}

}  // namespace

AlgorithmSettings algorithm_settings(const ObjectiveOptions& options) {
  auto settings = defaults_of(options.algorithm);
  settings.advantage = options.advantage.value_or(settings.advantage);
  settings.aggregation = options.aggregation.value_or(settings.aggregation);
  auto& objective = settings.objective;
  objective.clip = {.low = options.clip_low.value_or(objective.clip.low),
                    .high = options.clip_high.value_or(objective.clip.high),
                    .dual = options.dual_clip};
  const bool gae = settings.advantage == Advantage::kGae;
  settings.gae = {.gamma = options.gamma, .lambda = options.gae_lambda};
  settings.whiten = options.whiten.value_or(gae);
  (gae ? settings.reward_kl_coef : objective.kl_coef) = options.kl_coef;
  objective.entropy_coef = options.entropy_coef;
  objective.value_coef = options.value_coef;
  objective.value_clip = options.value_clip;
  objective.kl = options.kl;
  objective.correction = options.correction;
  objective.correction_range = {.low = options.correction_low, .high = options.correction_high};
  return settings;
}

}  // namespace sluice
