// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/parameter.h"

namespace sluice {

// What the rewards to come are expected to be, read off the hidden states that the decoder's head reads (PPO's critic,
// sharing the policy's decoder): V_t = w h_t + b in float32, drawn as 0. It belongs to a run, not to a model: training
// checkpoints hold it, exports do not.
class ValueHead : public Module {
 public:
  explicit ValueHead(std::int64_t hidden_size);
  Tensor forward(const Tensor& hidden) const;  // [T, D] of any float type to [T] float32

 private:
  Parameter& weight_;  // value_head.weight [1, D]
  Parameter& bias_;    // value_head.bias [1]
};

}  // namespace sluice
