// SPDX-License-Identifier: Apache-2.0
// Training on short packs without their thousands of launches: forward and backward of a pack, its gradients added to
// their sums, are recorded once for a shape (train/batch.h) and replayed for later packs that fill it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "sluice/kernels/common/recorded_work.h"
#include "sluice/train/gradient_sum.h"
#include "sluice/train/step.h"

namespace sluice {

// Empty, or why a pass of this training cannot be recorded.
std::string why_not_recorded(const Objective& objective);

// Whether the host takes longer to launch the kernels of a pack's pass than an H200 to run them.
bool launches_bind(const Objective& objective, std::int64_t tokens, std::int64_t asked);

class RecordedPacks {
 public:
  // As record_work() of the weights' device.
  using Record = std::function<std::unique_ptr<RecordedWork>(const std::function<void()>& work, RecordedWork* beside)>;

  // Parameters must stay where they are. Both must outlive this; from the first recording on the sums stay where they
  // are (GradientSum::keep_places()).
  RecordedPacks(const Objective& objective, GradientSum& gradients, Record record);
  ~RecordedPacks();

  struct Added {
    Tensor loss;   // float64 scalar: of the pack, divided by the weight of all trained tokens of the step
    Tensor right;  // int64 scalar: trained tokens whose likeliest token is the right one
  };

  // Forward and backward of a pack; `weight`: of all trained tokens of the step. Nothing is done where launches do not
  // bind. A shape's first pack is not recorded, its second is, those after it are replays: all are filled up, and have
  // the same bits in each of the three ways.
  std::optional<Added> add(const PackedBatch& packed, double weight);

 private:
  struct Pass;
  void run(const Batch& batch);
  std::unique_ptr<Pass> record(Batch batch);

  const Objective& objective_;
  GradientSum& gradients_;
  Record record_;
  Added sums_;                                         // of the pass that ran last
  std::map<PackShape, std::unique_ptr<Pass>> passes_;  // null: seen once
  RecordedWork* recorded_ = nullptr;                   // one of them; null: none yet
  int num_recorded_ = 0;
};

}  // namespace sluice
