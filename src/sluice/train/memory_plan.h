// SPDX-License-Identifier: Apache-2.0
// The memory of a training run, or of sampling, known before anything is loaded: the program's own forward and backward
// pass runs on tensors without storage, and what they would hold is counted. Not counted is what an operator needs
// within itself (its header says how much), and what the heap loses between tensors.
#pragma once

#include <cstdint>

#include "sluice/models/family.h"
#include "sluice/train/options.h"

namespace sluice {

struct PlannedRun {
  at::ScalarType dtype;          // of parameters and activations
  std::int64_t seq_len;          // tokens of a row: one sequence, each of its tokens trained
  std::int64_t tokens_per_step;  // in rows of seq_len, whose gradients are summed
  MtpTraining mtp = MtpTraining::kOff;
  const Mesh& mesh = one_process();  // on paper: the plan is of its rank
};

// Bytes, of one rank.
struct TrainingMemory {
  std::int64_t parameters;       // that are held; not the tables that are read from the mapped file
  std::int64_t optimizer;        // masters and moments in float32; a float32 parameter is its own master
  std::int64_t gradients;        // their sums in float32
  std::int64_t activations;      // of a row, and its gradients: what is held beside the sums where that is most. Of
                                 // experts over ranks as if tokens went to them evenly
  std::int64_t checkpoint_copy;  // masters and moments again, while a checkpoint is written beside training
  std::int64_t mapped;           // tables that stay in the file
  std::int64_t together() const { return parameters + optimizer + gradients + activations; }
};

// The model must have been built and not loaded; its parameters get values without storage. Set recompute, and declare
// adapters, before.
TrainingMemory plan_training(const Model& model, const PlannedRun& run);

// What the states of `slots` sequences of up to `capacity` tokens hold while sampling: keys and values, convolution
// tails, recurrent states. After plan_training() alone.
std::int64_t plan_states(const Decoder& decoder, std::int64_t slots, std::int64_t capacity);

}  // namespace sluice
