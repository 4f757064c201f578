// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov, Hutter 2019) with float32 master weights and moments, shared among the ranks of a mesh
// (train/shards.h).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/layers/parameter.h"
#include "sluice/train/shards.h"

namespace sluice {

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  std::map<std::string, double> lr_ratios = {};  // by parameter: its learning rate, times the run's; others 1
};

// Gradients of one optimizer step, summed in float32 over its micro-batches.
class GradientSum {
 public:
  // The mesh must outlive it.
  explicit GradientSum(const std::vector<Parameter*>& parameters, const Mesh& mesh = one_process());

  // Takes what backward() left on the parameters and clears it there. A parameter that got none counts as zero.
  void take();

  // After the last take(): adds up what the ranks of the mesh have; each keeps the rows that it owns.
  void reduce();

  // The norm over all parameters of the model together, in float64 and in a fixed order: a scalar on their device, the
  // same on every rank. Each element is counted once, by its owner.
  Tensor norm() const;

  // Name of the first parameter whose gradient holds a number that is not finite, on any rank; empty: none.
  std::string first_not_finite() const;

  const Tensor& of(std::size_t index) const { return sums_[index]; }  // of the rows that are owned; undefined: zero
  const Mesh& mesh() const { return shards_.mesh(); }
  void clear();

 private:
  Shards shards_;
  std::vector<Tensor> sums_;  // float32, or undefined
};

using OptimizerState = std::map<std::string, std::vector<TensorParts>>;  // by kind

class AdamW {
 public:
  // The mesh must outlive it.
  AdamW(const std::vector<Parameter*>& parameters, const AdamWSettings& settings, const Mesh& mesh = one_process());

  // One update with every gradient multiplied by `gradient_scale` (of clipping), a float64 scalar on the parameters'
  // device; NaN: nothing is updated. Parameters decay where they declare it. On a GPU nothing waits for it.
  void step(const GradientSum& gradients, double lr, const Tensor& gradient_scale);

  // What a training checkpoint holds of this rank: "master", "exp_avg" and "exp_avg_sq", each by parameter name. The
  // tensors share memory with the optimizer.
  OptimizerState state() const;

  // Takes its own out of what state() of all ranks gave, `steps_done` steps into a run, whatever their mesh was. Data
  // error if the names or shapes are not ours.
  void restore(const OptimizerState& state, std::int64_t steps_done);

 private:
  struct Slot {
    Parameter* parameter;
    // [rows that are owned, columns] float32; the master of a float32 parameter is the parameter itself.
    Tensor master, exp_avg, exp_avg_sq;
    double lr_ratio;
  };
  void step_on_cpu(const GradientSum& gradients, double lr, double gradient_scale);
  void step_on_gpu(const GradientSum& gradients, double lr, const Tensor& gradient_scale);
  void publish();  // masters to the parameters, here and on the ranks that hold the same
  Shards shards_;
  std::vector<Slot> slots_;
  AdamWSettings settings_;
  std::int64_t steps_ = 0;
};

}  // namespace sluice
