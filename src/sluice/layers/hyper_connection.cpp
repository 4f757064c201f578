// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/hyper_connection.h"

#include <cassert>

#include "sluice/kernels/stream_inject/stream_inject.h"
#include "sluice/kernels/stream_mix/stream_mix.h"

namespace sluice {

HyperConnection::HyperConnection(const HyperConnectionSizes& s, Role role)
    : streams_(s.streams),
      hc_norm_(add("hc_norm", std::make_unique<GroupedRmsNorm>(s.streams, s.hidden_size, s.rms_norm_eps))),
      input_mix_weight_down_(add("input_mix_weight_down",
                                 std::make_unique<Linear>(s.rank, s.streams * s.hidden_size, s.initializer_range))),
      input_mix_weight_up_(add("input_mix_weight_up",
                               std::make_unique<Linear>(s.streams * s.hidden_size, s.rank, s.initializer_range))) {
  if (role == Role::kPart) {
    block_inject_weight_ = &add("block_inject_weight",
                                std::make_unique<Linear>(s.streams, s.streams * s.hidden_size, s.initializer_range));
  }
}

Tensor HyperConnection::mix(const Tensor& normed) const {
  const auto down = at::silu(input_mix_weight_down_.forward(normed.flatten(1)) / streams_);  // [T, rank]
  return stream_mix(normed, input_mix_weight_up_.forward(down).view(normed.sizes()));
}

Tensor HyperConnection::read(const Tensor& residual) const { return mix(hc_norm_.forward(residual)); }

Tensor HyperConnection::around(const Tensor& residual, const Part& part) const {
  assert(block_inject_weight_ != nullptr);
  const auto normed = hc_norm_.forward(residual);                                   // [T, n, D]
  const auto inject = block_inject_weight_->forward(normed.flatten(1)) / streams_;  // [T, n]
  const auto y = part(mix(normed));                                                 // [T, D]
  return stream_inject(residual.view(normed.sizes()), y, inject).flatten(1);
}

void HyperConnection::count_operations(double tokens, Operations& operations) const {
  for (const auto* projection : {&input_mix_weight_down_, &input_mix_weight_up_, block_inject_weight_}) {
    if (projection != nullptr) operations["hyper-connections"] += projection->operations(tokens);
  }
}

}  // namespace sluice
