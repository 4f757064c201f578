// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov, Hutter 2019) with float32 master weights and moments.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/layers/parameter.h"

namespace sluice {

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
};

// Gradients of one optimizer step, summed in float32 over its micro-batches.
class GradientSum {
 public:
  explicit GradientSum(std::vector<Parameter*> parameters);

  // Takes what backward() left on the parameters and clears it there. A parameter that got none counts as zero.
  void take();

  // The norm over all parameters together, in float64 and in a fixed order: a scalar on their device.
  Tensor norm() const;

  // Name of the first parameter whose gradient holds a number that is not finite; empty: none.
  std::string first_not_finite() const;

  const Tensor& of(std::size_t index) const { return sums_[index]; }  // undefined: zero
  void clear();

 private:
  std::vector<Parameter*> parameters_;
  std::vector<Tensor> sums_;  // float32, or undefined
};

class AdamW {
 public:
  AdamW(std::vector<Parameter*> parameters, const AdamWSettings& settings);

  // One update with every gradient multiplied by `gradient_scale` (of clipping), a float64 scalar on the parameters'
  // device; NaN: nothing is updated. Parameters decay where they declare it. On a GPU nothing waits for it.
  void step(const GradientSum& gradients, double lr, const Tensor& gradient_scale);

  // What a training checkpoint holds: "master", "exp_avg" and "exp_avg_sq", each by parameter name. The tensors share
  // memory with the optimizer.
  std::map<std::string, NamedTensors> state() const;

  // Takes back what state() gave `steps_done` steps into a run. Data error if the names or shapes are not ours.
  void restore(const std::map<std::string, NamedTensors>& state, std::int64_t steps_done);

 private:
  struct Slot {
    Parameter* parameter;
    Tensor master, exp_avg, exp_avg_sq;  // float32; the master of a float32 parameter is the parameter itself
  };
  void step_on_cpu(const GradientSum& gradients, double lr, double gradient_scale);
  void step_on_gpu(const GradientSum& gradients, double lr, const Tensor& gradient_scale);
  void publish();  // masters to the parameters that are held in another dtype
  std::vector<Slot> slots_;
  AdamWSettings settings_;
  std::int64_t steps_ = 0;
};

}  // namespace sluice
