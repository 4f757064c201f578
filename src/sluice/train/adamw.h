// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov, Hutter 2019) with float32 master weights and moments.
#pragma once

#include <string>
#include <utility>
#include <vector>

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

  // The norm over all parameters together, in float64 and in a fixed order.
  double norm() const;

  // Name of the first parameter whose gradient holds a number that is not finite; empty: none.
  std::string first_not_finite() const;

  const Tensor& of(std::size_t index) const { return sums_[index]; }   // undefined: zero
  void clear();

 private:
  std::vector<Parameter*> parameters_;
  std::vector<Tensor> sums_;   // float32, or undefined
};

class AdamW {
 public:
  AdamW(std::vector<Parameter*> parameters, const AdamWSettings& settings);

  // One update with every gradient multiplied by `gradient_scale` (of clipping). Parameters decay where they declare it.
  void step(const GradientSum& gradients, double lr, double gradient_scale);

  // Masters, first and second moments by name, for a training checkpoint: "model.norm.weight",
  // "model.norm.weight.exp_avg", "model.norm.weight.exp_avg_sq". They share memory with the optimizer.
  std::vector<std::pair<std::string, Tensor>> state() const;
  std::int64_t steps_done() const { return steps_; }

  // After the tensors of state() were overwritten with those of a checkpoint.
  void restore(std::int64_t steps_done);

 private:
  struct Slot {
    Parameter* parameter;
    Tensor master, exp_avg, exp_avg_sq;   // float32; the master of a float32 parameter is the parameter itself
  };
  std::vector<Slot> slots_;
  AdamWSettings settings_;
  std::int64_t steps_ = 0;
};

}  // namespace sluice
