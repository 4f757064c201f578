// SPDX-License-Identifier: Apache-2.0
// Gradients of one optimizer step, summed in float32 over its micro-batches and over the ranks of a mesh.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "sluice/train/shards.h"

namespace sluice {

class GradientSum {
 public:
  // Where the sums over micro-batches lie until the last: of all that a rank holds, or of the rows that it owns alone
  // (ZeRO stage 2), which takes an exchange for every micro-batch.
  enum class Kept { kHeld, kOwned };

  // The mesh must outlive it, and so must the parameters.
  explicit GradientSum(const std::vector<Parameter*>& parameters, const Mesh& mesh = one_process(),
                       Kept kept = Kept::kHeld, std::int64_t bucket_elements = Shards::kBucketElements);

  // Runs the backward pass of a micro-batch's loss. Each gradient is added, and freed, as soon as it is there; a
  // parameter that gets none counts as zero. In the `last` micro-batch of a step, and in all where only owned rows are
  // kept, a bucket's sums over the ranks (train/shards.h) begin as soon as the last of its gradients is there, and the
  // pass goes on meanwhile. All ranks make the same exchanges in the same order, whatever gradients they have.
  void add(const Tensor& loss, bool last);

  // After the last micro-batch:

  // The norm over all parameters of the model together, in float64 and in a fixed order: a scalar on their device, the
  // same on every rank. Each element is counted once, by its owner.
  Tensor norm() const;

  // Name of the first parameter whose gradient holds a number that is not finite, on any rank; empty: none.
  std::string first_not_finite() const;

  const Tensor& of(std::size_t index) const { return sums_[index]; }  // of the rows that are owned; undefined: zero
  const Mesh& mesh() const { return shards_.mesh(); }
  void clear();

  // From here on each sum stays where it is, and clear() makes it zero: for work that adds to them and is recorded
  // (kernels/common/recorded_work.h). Of one process.
  void keep_places();

 private:
  void take(std::size_t index);
  void start_next_bucket();
  void finish_first_bucket();

  Shards shards_;
  Kept kept_;
  std::vector<Tensor> pieces_;  // float32, of parameters that several ranks hold: what is not yet summed over them
  std::vector<Tensor> sums_;    // float32, or undefined
  bool stay_ = false;           // where they are

  // Of the backward pass that runs.
  bool exchanges_ = false;
  std::vector<std::size_t> awaited_;  // by bucket: gradients that are still to come
  std::size_t next_bucket_ = 0;       // the first that has not been started
  std::deque<std::pair<std::size_t, Shards::Sums>> started_;
};

}  // namespace sluice
