// SPDX-License-Identifier: Apache-2.0
// One optimizer step of supervised fine-tuning, and its counterpart without gradients.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "sluice/models/decoder.h"
#include "sluice/train/adamw.h"
#include "sluice/train/batch.h"

namespace sluice {

struct LossStats {
  double loss = 0;          // mean over the trained tokens, by their weight
  double accuracy = 0;      // part of the trained tokens whose likeliest token is the right one
  std::int64_t tokens = 0;  // all of them
  std::int64_t trained_tokens = 0;
};

struct StepStats : LossStats {
  double grad_norm = 0;  // before clipping
};

// Sums the gradients of all packs, divided by the weight of all trained tokens together, clips their norm to
// `clip_norm` (0: not at all) and updates. A step without a trained token has loss 0 and changes nothing. NaN error,
// before anything is updated, if loss or gradients are not finite; it names the step and the first bad tensor.
StepStats train_step(const Decoder& model, const std::vector<PackedBatch>& packs, GradientSum& gradients,
                     AdamW& optimizer, std::int64_t step, double lr, double clip_norm);

LossStats evaluate(const Decoder& model, std::span<const PackedBatch> packs);

}  // namespace sluice
