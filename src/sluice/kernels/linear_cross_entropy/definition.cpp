// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {

LinearCrossEntropyOutput linear_cross_entropy_definition(const Tensor& hidden, const Tensor& weight,
                                                         const Tensor& targets, double logit_scale, bool entropy) {
  const auto type = wide_type(hidden.scalar_type());
  const auto logits = logit_scale * hidden.to(type).matmul(weight.to(type).t());  // [T, V]
  const auto ignored = targets == -100, elsewhere = targets == -1;
  const auto lse = logits.logsumexp(1), logprobs = logits.log_softmax(1);
  const auto own = targets.masked_fill(ignored.logical_or(elsewhere), 0);
  const auto picked = logits.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
  return {.nll = (lse - picked).masked_fill(ignored, 0),
          .predicted = logits.argmax(1).masked_fill(ignored, -100),
          .entropy = entropy ? (logprobs.exp() * logprobs).sum(1).neg().masked_fill(ignored, 0) : Tensor(),
          .lse = lse.masked_fill(ignored, 0).detach()};
}

}  // namespace sluice
