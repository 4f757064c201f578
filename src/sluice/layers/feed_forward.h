// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/linear.h"
#include "sluice/layers/operations.h"
#include "sluice/layers/pack.h"

namespace sluice {

// The part of a block that works on each token alone.
class FeedForward : public Module {
 public:
  virtual Tensor forward(const Tensor& x, const ForwardContext& context) const = 0;  // [T, D] to [T, D]

  // The same, context.feed_forward_tokens at a time: the inner activations of a long pack are never all there.
  Tensor forward_in_parts(const Tensor& x, const ForwardContext& context) const;

  // Empty, or why the kernels for GPUs do not serve this part.
  virtual std::string why_not_on_gpu() const { return ""; }

  // Adds the operations of a forward pass over that many tokens.
  virtual void count_operations(double tokens, Operations& operations) const = 0;
};

// down( silu(gate x) * up x ), Shazeer 2020.
class SwiGlu : public FeedForward {
 public:
  SwiGlu(std::int64_t hidden_size, std::int64_t intermediate_size, double initializer_range);
  Tensor forward(const Tensor& x, const ForwardContext& context) const override;
  void count_operations(double tokens, Operations& operations) const override;

 private:
  Linear &gate_proj_, &up_proj_, &down_proj_;
};

}  // namespace sluice
