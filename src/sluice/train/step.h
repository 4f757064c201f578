// SPDX-License-Identifier: Apache-2.0
// One optimizer step of supervised fine-tuning, and its counterpart without gradients.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "sluice/layers/lora.h"
#include "sluice/models/decoder.h"
#include "sluice/models/multi_token_prediction.h"
#include "sluice/train/adamw.h"
#include "sluice/train/batch.h"

namespace sluice {

// What is minimised: the language-modelling loss, and what is asked for beside it.
struct Objective {
  const Decoder& decoder;
  double router_aux_loss_coef = 0;            // of the load-balancing loss; 0: none
  const MultiTokenPrediction* mtp = nullptr;  // null: not trained
  double mtp_loss_scale = 0;
  bool mtp_only = false;            // no gradient reaches the decoder
  LoraDropout* adapters = nullptr;  // not null: adapters are trained, the model is not
};

struct LossStats {
  double loss = 0;             // mean over the trained tokens, by their weight
  double router_aux_loss = 0;  // mean over the packs by their tokens, unweighted; 0 where it is not minimised
  double mtp_loss = 0;         // as loss, of multi-token prediction, unweighted
  double accuracy = 0;         // part of the trained tokens whose likeliest token is the right one
  std::int64_t tokens = 0;     // all of them
  std::int64_t trained_tokens = 0;
};

struct StepStats : LossStats {
  double grad_norm = 0;  // before clipping
};

// The losses of one pack, as parts of those of its step.
struct PackLosses {
  Tensor minimised;  // scalar, for backward(); of several ranks this one's part
  Tensor parts;      // [4] float64, without a graph: loss, router_aux_loss and mtp_loss as in LossStats, and how many
                     // trained tokens have the right one as their likeliest
};

// Forward pass of a pack, whose loss weights are divided by those of all trained tokens of the step; so are those of
// `next`, what multi-token prediction learns from the pack (next_tokens(); null: nothing). `share`: of the step's
// tokens, by which the pack's load balancing counts.
PackLosses pack_losses(const Objective& objective, const Batch& batch, const Batch* next = nullptr, double share = 0);

// Empty, or why pack_losses() and its backward pass cannot be recorded once for all packs of a shape.
std::string why_not_recorded(const Objective& objective);

class RecordedPacks;  // train/recorded_packs.h

// Sums the gradients of all packs, divided by the weight of all trained tokens together, clips their norm to
// `clip_norm` (0: not at all) and updates. A step without a trained token has loss 0 and changes nothing. NaN error,
// before anything is updated, if loss or gradients are not finite; it names the step and the first bad tensor.
// `recorded`, of the same objective and gradients, takes all packs; null: they are launched.
StepStats train_step(const Objective& objective, const std::vector<PackedBatch>& packs, GradientSum& gradients,
                     AdamW& optimizer, std::int64_t step, double lr, double clip_norm,
                     RecordedPacks* recorded = nullptr);

// The part of a step before its update: forward and backward of every pack, their gradients added to `gradients`. It
// reads no value, so tensors of the meta device will do.
void add_gradients(const Objective& objective, std::span<const PackedBatch> packs, GradientSum& gradients);

LossStats evaluate(const Objective& objective, std::span<const PackedBatch> packs);

}  // namespace sluice
