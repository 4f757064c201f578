// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/linear.h"

namespace sluice {

// The part of a block that works on each token alone.
class FeedForward : public Module {
 public:
  virtual Tensor forward(const Tensor& x) const = 0;  // [T, D] to [T, D]
};

// down( silu(gate x) * up x ), Shazeer 2020.
class SwiGlu : public FeedForward {
 public:
  SwiGlu(std::int64_t hidden_size, std::int64_t intermediate_size, double initializer_range);
  Tensor forward(const Tensor& x) const override;

 private:
  Linear &gate_proj_, &up_proj_, &down_proj_;
};

}  // namespace sluice
