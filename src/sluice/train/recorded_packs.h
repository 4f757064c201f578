// SPDX-License-Identifier: Apache-2.0
// Training on short packs without their thousands of launches: forward and backward of a pack, its gradients added to
// their sums, are recorded once for a shape (train/batch.h) and replayed for later packs that fill it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "sluice/kernels/common/recorded_work.h"
#include "sluice/train/gradient_sum.h"
#include "sluice/train/step.h"

namespace sluice {

// Whether the host takes longer to launch the kernels of a pack's pass than an H200 to run them: of a pack of one
// sequence, each of its tokens trained.
bool launches_bind(const Objective& objective, std::int64_t tokens);

class RecordedPacks {
 public:
  // As record_work() of the weights' device.
  using Recorder =
      std::function<std::unique_ptr<RecordedWork>(const std::function<void()>& work, RecordedWork* beside)>;

  // Each takes some MiB. Full packs have few; of others, those are recorded that come again first.
  static constexpr std::size_t kMostShapes = 64;

  // Of an objective that can be recorded (why_not_recorded()). Both must outlive this; the sums stay where they are
  // (GradientSum::keep_places()).
  RecordedPacks(const Objective& objective, GradientSum& gradients, Recorder recorder);

  // Forward and backward of a pack; its losses come without a graph. `weight`: of all trained tokens of the step. A
  // shape's first pack is not recorded, its second is, those after it are replays: all are filled up, and have the same
  // bits in each of the three ways. Where a parameter lies elsewhere than before, all are recorded anew.
  PackLosses add(const PackedBatch& packed, double weight);

 private:
  struct Pass {
    Batch batch;
    std::unique_ptr<RecordedWork> work;
  };
  void run(const Batch& batch);
  void record(const PackShape& shape, Batch batch);
  void replay(const Pass& pass, const Batch& batch);

  const Objective& objective_;
  GradientSum& gradients_;
  Recorder recorder_;
  PackLosses last_;                   // of the pass that ran last
  std::vector<const void*> weights_;  // where they lay then
  std::set<PackShape> seen_;
  std::map<PackShape, Pass> passes_;
};

}  // namespace sluice
