// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/feed_forward.h"

#include "sluice/kernels/swiglu/swiglu.h"
#include "sluice/layers/tensor_parallel.h"

namespace sluice {

Tensor FeedForward::forward_in_parts(const Tensor& x, const ForwardContext& context) const {
  const auto most = context.feed_forward_tokens;
  if (most == 0 || x.size(0) <= most) return forward(x, context);
  std::vector<Tensor> parts;
  auto own = context;
  for (const auto& part : x.split(most)) {
    parts.push_back(forward(part, own));
    own.first_token += part.size(0);
  }
  return at::cat(parts);
}

SwiGlu::SwiGlu(std::int64_t hidden_size, std::int64_t intermediate_size, double initializer_range)
    : gate_proj_(add("gate_proj",
                     std::make_unique<Linear>(intermediate_size, hidden_size, initializer_range, Split::anywhere(0)))),
      up_proj_(add("up_proj",
                   std::make_unique<Linear>(intermediate_size, hidden_size, initializer_range, Split::anywhere(0)))),
      down_proj_(add("down_proj",
                     std::make_unique<Linear>(hidden_size, intermediate_size, initializer_range, Split::anywhere(1)))) {
}

Tensor SwiGlu::forward(const Tensor& x, const ForwardContext& context) const {
  const auto y = column_parallel(x, {&gate_proj_, &up_proj_}, context).y;
  return row_parallel(swiglu(y[0], y[1]), down_proj_, context);
}

void SwiGlu::count_operations(double tokens, Operations& operations) const {
  for (const auto* projection : {&gate_proj_, &up_proj_, &down_proj_}) {
    operations["feed-forward"] += projection->operations(tokens);
  }
}

}  // namespace sluice
