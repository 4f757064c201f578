// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/parallel/group.h"

namespace sluice {

struct VocabularyLoss {
  Tensor loss;       // scalar, float32 or hidden's dtype if wider: this rank's part; the parts add up to the loss
  Tensor predicted;  // [A] int64: id of the largest logit
};

// linear_cross_entropy_loss() with the head's rows split over `ranks`, each of which has tokens of its own. hidden
// [A, D], targets [A] and loss_weight [A] are of this rank's tokens; `rows` says how many each rank has; `head` is this
// rank's piece of the [vocab_size, D]. Each rank forms the logits of all tokens with its rows, and the softmax is
// joined by the ranks' log-sums (Korthikanti et al. 2022). Differentiable in hidden and head; the logits are computed
// again in backward.
VocabularyLoss vocabulary_loss(const Tensor& hidden, const Tensor& head, const Tensor& targets,
                               const Tensor& loss_weight, const std::vector<std::int64_t>& rows,
                               std::int64_t vocab_size, const Group& ranks);

}  // namespace sluice
