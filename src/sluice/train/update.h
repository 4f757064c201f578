// SPDX-License-Identifier: Apache-2.0
// One optimizer step, whatever it minimises.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "sluice/layers/lora.h"
#include "sluice/train/adamw.h"

namespace sluice {

struct UpdateSettings {
  std::int64_t step;  // of the run
  double lr;
  double clip_norm;                 // largest norm of all gradients together; 0: no clipping
  LoraDropout* adapters = nullptr;  // not null: its passes are numbered
};

// Which of a step's packs a rank works on: data rank d of dp on numbers d, d + dp, .. Each rank has as many numbers, so
// that all make the same exchanges; those from `packs` on stand for a pack that adds nothing.
std::vector<std::size_t> own_packs(std::size_t packs, const Mesh& mesh);

// Forward and backward of the pack of a number: its gradients are added to the sum that update() is given. Returns its
// part of what is minimised, without a graph. `last`: as GradientSum::add().
using AddPack = std::function<Tensor(std::size_t number, bool last)>;

// Has the packs 0 to `packs` - 1 added to `gradients`, empty before, clips their norm and updates. Ranks of the
// gradients' mesh share the packs (own_packs()). Returns the norm before clipping, a float64 scalar on the parameters'
// device; nothing waits for it. Where a loss or the norm is not finite nothing is updated; the caller, once it has read
// them, says so by check_finite().
Tensor update(std::size_t packs, const AddPack& add_pack, GradientSum& gradients, AdamW& optimizer,
              const UpdateSettings& settings);

// NaN error that names the step and the first bad tensor, unless both are finite. `gradients` as update() left them.
void check_finite(double loss, double grad_norm, const GradientSum& gradients, std::int64_t step);

}  // namespace sluice
