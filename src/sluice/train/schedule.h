// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace sluice {

enum class ScheduleShape { kConstant, kLinear, kCosine, kWsd };

struct Schedule {
  ScheduleShape shape = ScheduleShape::kCosine;
  double lr = 1e-5;               // at the peak
  double min_lr_ratio = 0;        // of the peak, at the end
  std::int64_t warmup_steps = 0;  // rise in a straight line; step 1 already has lr / warmup_steps
  std::int64_t decay_steps = 0;   // of WSD: its last steps, falling in a straight line
  std::int64_t total_steps = 1;
};

// The learning rate of optimizer step `step`, 1 to total_steps. Warm-up, then constant; or a fall to lr * min_lr_ratio
// at the last step, in a straight line, along half a cosine, or (WSD: warm-up, stable, decay; Hu et al. 2024) only over
// the last decay_steps.
double learning_rate(const Schedule& schedule, std::int64_t step);

}  // namespace sluice
