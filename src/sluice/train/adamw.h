// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov, Hutter 2019) with float32 master weights and moments, shared among the ranks of a mesh
// (train/shards.h).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/layers/parameter.h"
#include "sluice/train/gradient_sum.h"
#include "sluice/train/offload.h"

namespace sluice {

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  std::map<std::string, double> lr_ratios = {};  // by parameter: its learning rate, times the run's; others 1
};

using OptimizerState = std::map<std::string, std::vector<TensorParts>>;  // by kind

class AdamW {
 public:
  // The mesh must outlive it. Runtime error if the states are to lie in a file and the disk has no room for it.
  AdamW(const std::vector<Parameter*>& parameters, const AdamWSettings& settings, const Mesh& mesh = one_process(),
        const OffloadSettings& offload = {});

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
  struct States {
    Tensor master, exp_avg, exp_avg_sq;  // [rows, columns] float32
    States rows(std::int64_t first, std::int64_t count) const;
    States to(at::Device device) const;  // the same tensors where they lie there
  };
  struct Slot {
    Parameter* parameter;
    States states;  // of the rows that are owned; the master of a float32 parameter is the parameter itself
    double lr_ratio;
  };
  // Some rows of a slot's.
  struct Part {
    std::size_t slot;
    std::int64_t first, count;
  };
  struct Work;
  void divide(std::int64_t part_elements);
  void step_on_cpu(std::vector<Work>& work, double gradient_scale) const;
  void step_on_gpu(std::vector<Work>& work, const Tensor& gradient_scale) const;
  std::vector<Tensor> states_of(const std::vector<Part>& parts) const;  // that lie apart from the parameters

  Shards shards_;
  AdamWSettings settings_;
  StatePlaces places_;
  std::vector<Slot> slots_;
  std::vector<std::vector<Part>> batches_;  // what is on the device together in a step
  std::int64_t steps_ = 0;
};

}  // namespace sluice
