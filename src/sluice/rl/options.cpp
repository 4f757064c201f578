// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/options.h"

namespace sluice {
namespace {

// The papers' values; CISPO's bounds as ScaleRL (Khatri et al. 2025) has them: none below, 5 above.
ObjectiveSettings defaults_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kDapo:
      return {PolicyObjective::kClip, Advantage::kGroup, {.low = 0.2, .high = 0.28}, Aggregation::kTokenMean};
    case Algorithm::kDrGrpo:
      return {PolicyObjective::kClip, Advantage::kGroupMean, {}, Aggregation::kSequenceSumFixed};
    case Algorithm::kGspo:
      return {PolicyObjective::kGspo, Advantage::kGroup, {.low = 3e-4, .high = 4e-4}, Aggregation::kSequenceMean};
    case Algorithm::kCispo:
      return {PolicyObjective::kCispo, Advantage::kGroup, {.low = 1, .high = 4}, Aggregation::kTokenMean};
    default:
      return {PolicyObjective::kClip, Advantage::kGroup, {}, Aggregation::kSequenceMean};
  }
}

}  // namespace

ObjectiveSettings objective_settings(const ObjectiveOptions& options) {
  auto settings = defaults_of(options.algorithm);
  settings.advantage = options.advantage.value_or(settings.advantage);
  settings.aggregation = options.aggregation.value_or(settings.aggregation);
  settings.clip = {.low = options.clip_low.value_or(settings.clip.low),
                   .high = options.clip_high.value_or(settings.clip.high),
                   .dual = options.dual_clip};
  return settings;
}

}  // namespace sluice
