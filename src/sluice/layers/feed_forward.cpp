// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/feed_forward.h"

#include "sluice/kernels/swiglu/swiglu.h"

namespace sluice {

SwiGlu::SwiGlu(std::int64_t hidden_size, std::int64_t intermediate_size, double initializer_range)
    : gate_proj_(add("gate_proj", std::make_unique<Linear>(intermediate_size, hidden_size, initializer_range))),
      up_proj_(add("up_proj", std::make_unique<Linear>(intermediate_size, hidden_size, initializer_range))),
      down_proj_(add("down_proj", std::make_unique<Linear>(hidden_size, intermediate_size, initializer_range))) {}

Tensor SwiGlu::forward(const Tensor& x, const ForwardContext&) const {
  return down_proj_.forward(swiglu(gate_proj_.forward(x), up_proj_.forward(x)));
}

void SwiGlu::count_operations(double tokens, Operations& operations) const {
  for (const auto* projection : {&gate_proj_, &up_proj_, &down_proj_}) {
    operations["feed-forward"] += projection->operations(tokens);
  }
}

}  // namespace sluice
