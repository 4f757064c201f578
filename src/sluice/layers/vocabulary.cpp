// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/vocabulary.h"

#include <numeric>

#include <torch/custom_class.h>

#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "sluice/layers/split.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

// The logits of these ids, by rows of the head: [A] float32 or wider. In parts, since each token has a row of its own.
Tensor logits_of(const Tensor& hidden, const Tensor& head, const Tensor& ids) {
  constexpr std::int64_t kTokens = 4096;
  const auto wide = hidden.scalar_type() == kDouble ? kDouble : kFloat;
  std::vector<Tensor> logits;
  for (std::int64_t t = 0; t == 0 || t < hidden.size(0); t += kTokens) {
    const auto count = std::min(kTokens, hidden.size(0) - t);
    const auto rows = head.index_select(0, ids.narrow(0, t, count)).to(wide);
    logits.push_back((hidden.narrow(0, t, count).to(wide) * rows).sum(1));
  }
  return at::cat(logits);
}

struct Ranks : torch::CustomClassHolder {
  Ranks(const Group& g, std::vector<std::int64_t> r) : group(g), rows(std::move(r)) {}
  Group group;
  std::vector<std::int64_t> rows;
};

class SplitLoss : public torch::autograd::Function<SplitLoss> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& own_hidden,
                                                const Tensor& head, const Tensor& own_targets, const Tensor& own_weight,
                                                std::int64_t vocab_size, const c10::intrusive_ptr<Ranks>& ranks) {
    const at::AutoDispatchBelowAutograd below;
    const auto& group = ranks->group;
    const auto all = [&](const Tensor& x) { return all_gather_rows(x, ranks->rows, group); };
    const auto first = piece_begin(vocab_size, group.size(), group.rank());
    const auto hidden = all(own_hidden), weight = all(own_weight);
    const auto place = all(own_targets) - first;
    const auto is_own = (place >= 0).bitwise_and(place < head.size(0));
    const auto targets = place.masked_fill(is_own.bitwise_not(), -1);
    const auto part = linear_cross_entropy(hidden, head, targets);
    // Of each token: log-sum, logit of its target or 0 where that is elsewhere, largest logit, and its id.
    const auto mine =
        at::stack({part.lse, (part.lse - part.nll).masked_fill(is_own.bitwise_not(), 0),
                   logits_of(hidden, head, part.predicted), (part.predicted + first).to(part.lse.scalar_type())});
    const std::vector<std::int64_t> one(static_cast<std::size_t>(group.size()), 1);
    const auto parts = all_gather_rows(mine.unsqueeze(0), one, group);  // [ranks, 4, all tokens]
    const auto lse = parts.select(1, 0).logsumexp(0);
    const auto best = parts.select(1, 2).argmax(0, /*keepdim=*/true);  // the first of equal ones
    const auto predicted = parts.select(1, 3).gather(0, best).squeeze(0).to(kLong);
    const auto begin = std::accumulate(ranks->rows.begin(), ranks->rows.begin() + group.rank(), std::int64_t{0});
    const auto own = [&](const Tensor& x) { return x.narrow(0, begin, own_hidden.size(0)); };
    const auto loss = (own(lse - parts.select(1, 1).sum(0)) * own_weight).sum();
    context->save_for_backward({hidden, head, targets, weight, lse});
    context->saved_data["ranks"] = c10::IValue::make_capsule(ranks);
    const auto own_predicted = own(predicted).clone();
    context->mark_non_differentiable({own_predicted});
    return {loss, own_predicted};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto ranks = c10::static_intrusive_pointer_cast<Ranks>(context->saved_data["ranks"].toCapsule());
    const at::AutoDispatchBelowAutograd below;
    // Each rank's tokens have the gradient that its own part of the loss got.
    const auto own = grads[0].expand({ranks->rows[static_cast<std::size_t>(ranks->group.rank())]}).contiguous();
    const auto grad_nll = saved[3] * all_gather_rows(own, ranks->rows, ranks->group);
    const bool head_too = context->needs_input_grad(1);
    const auto gradients = linear_cross_entropy_backward(grad_nll, saved[0], saved[1], saved[2], saved[4],
                                                         /*logit_scale=*/1, head_too);
    return {reduce_scatter_rows(gradients.hidden, ranks->rows, ranks->group),
            head_too ? gradients.weight : Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

}  // namespace

VocabularyLoss vocabulary_loss(const Tensor& hidden, const Tensor& head, const Tensor& targets,
                               const Tensor& loss_weight, const std::vector<std::int64_t>& rows,
                               std::int64_t vocab_size, const Group& ranks) {
  if (ranks.size() == 1) {
    const auto whole = linear_cross_entropy_loss(hidden, head, targets, loss_weight);
    return {whole.loss, whole.predicted};
  }
  const auto outputs =
      SplitLoss::apply(hidden, head, targets, loss_weight, vocab_size, c10::make_intrusive<Ranks>(ranks, rows));
  return {outputs[0], outputs[1]};
}

}  // namespace sluice
