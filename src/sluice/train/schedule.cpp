// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sluice {
namespace {

// Part of the way from `begin` to `end`, 0 to 1.
double progress(std::int64_t step, std::int64_t begin, std::int64_t end) {
  if (end <= begin) return step > begin ? 1 : 0;
  return std::clamp(static_cast<double>(step - begin) / static_cast<double>(end - begin), 0.0, 1.0);
}

}  // namespace

double learning_rate(const Schedule& s, std::int64_t step) {
  if (step <= s.warmup_steps) return s.lr * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  double height = 1;  // of the way from the lowest rate up to the peak
  switch (s.shape) {
    case ScheduleShape::kConstant:
      return s.lr;
    case ScheduleShape::kLinear:
      height = 1 - progress(step, s.warmup_steps, s.total_steps);
      break;
    case ScheduleShape::kCosine:
      height = (1 + std::cos(std::numbers::pi * progress(step, s.warmup_steps, s.total_steps))) / 2;
      break;
    case ScheduleShape::kWsd:
      height = 1 - progress(step, std::max(s.warmup_steps, s.total_steps - s.decay_steps), s.total_steps);
      break;
  }
  return s.lr * (s.min_lr_ratio + (1 - s.min_lr_ratio) * height);
}

}  // namespace sluice
