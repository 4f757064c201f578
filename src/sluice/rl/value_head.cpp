// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/value_head.h"

namespace sluice {

ValueHead::ValueHead(std::int64_t hidden_size)
    : weight_(declare({.name = "value_head.weight", .shape = {1, hidden_size}, .dtype = kFloat, .init = {}})),
      bias_(declare({.name = "value_head.bias", .shape = {1}, .dtype = kFloat, .decay = false, .init = {}})) {}

Tensor ValueHead::forward(const Tensor& hidden) const {
  return at::linear(hidden.to(kFloat), weight_.value, bias_.value).squeeze(1);
}

}  // namespace sluice
