// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {

LinearCrossEntropyOutput linear_cross_entropy_definition(const Tensor& hidden, const Tensor& weight,
                                                         const Tensor& targets) {
  const auto type = wide_type(hidden.scalar_type());
  const auto logits = hidden.to(type).matmul(weight.to(type).t());  // [T, V]
  const auto ignored = targets == -100;
  const auto picked = logits.log_softmax(1).gather(1, targets.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1);
  return {picked.neg().masked_fill(ignored, 0), logits.argmax(1).masked_fill(ignored, -100)};
}

}  // namespace sluice
