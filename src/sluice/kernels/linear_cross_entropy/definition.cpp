// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {

LinearCrossEntropyOutput linear_cross_entropy_definition(const Tensor& hidden, const Tensor& weight,
                                                         const Tensor& targets, double logit_scale, bool entropy) {
  const auto type = wide_type(hidden.scalar_type());
  const auto logits = logit_scale * hidden.to(type).matmul(weight.to(type).t());  // [T, V]
  const auto ignored = targets == -100;
  const auto logprobs = logits.log_softmax(1);
  const auto picked = logprobs.gather(1, targets.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1);
  return {.nll = picked.neg().masked_fill(ignored, 0),
          .predicted = logits.argmax(1).masked_fill(ignored, -100),
          .entropy = entropy ? (logprobs.exp() * logprobs).sum(1).neg().masked_fill(ignored, 0).detach() : Tensor()};
}

}  // namespace sluice
