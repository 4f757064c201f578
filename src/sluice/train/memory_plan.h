// SPDX-License-Identifier: Apache-2.0
// The memory of a training run, or of sampling, known before anything is loaded (train/paper_step.h). Not counted is
// what an operator needs within itself (its header says how much), and what the heap loses between tensors.
#pragma once

#include <cstdint>

#include "sluice/train/paper_step.h"

namespace sluice {

// Bytes, of one rank.
struct TrainingMemory {
  std::int64_t parameters;       // that are held; not the tables that are read from the mapped file
  std::int64_t optimizer;        // masters and moments in float32; a float32 parameter is its own master. Of those that
                                 // lie elsewhere, what comes to the device at once
  std::int64_t gradients;        // their sums in float32, between two micro-batches
  std::int64_t activations;      // of a row, its gradients and what ranks exchange of them: what is held beside the
                                 // sums where that is most. Of experts over ranks as if tokens went to them evenly
  std::int64_t offloaded;        // masters and moments that lie elsewhere
  std::int64_t checkpoint_copy;  // masters and moments again, while a checkpoint is written beside training
  std::int64_t recorded;  // more, on a GPU, where packs are recorded (train/recorded_packs.h): sums that are there
                          // before the first pass, and what a pass holds once more, for replays; 0: they are not
  std::int64_t mapped;    // rows that the rank reads of tables that stay in the file
  std::int64_t together() const { return parameters + optimizer + gradients + activations; }
};

// `model` as PaperStep takes it.
TrainingMemory plan_training(const Model& model, const PlannedRun& run);

// What the states of `slots` sequences of up to `capacity` tokens hold while sampling: keys and values, convolution
// tails, recurrent states. After plan_training() alone.
std::int64_t plan_states(const Decoder& decoder, std::int64_t slots, std::int64_t capacity);

}  // namespace sluice
