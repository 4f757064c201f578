// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step.h"

#include <numeric>

#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "sluice/layers/experts.h"
#include "sluice/train/update.h"

namespace sluice {
namespace {

double weight_of(std::span<const PackedBatch> packs) {
  double sum = 0;
  for (const auto& pack : packs) sum = std::accumulate(pack.loss_weight.begin(), pack.loss_weight.end(), sum);
  return sum;
}

// Sums over packs. Those of tensors stay on the device, so that nothing waits for it before read().
struct Sums {
  double weight, next_weight = 0;      // of all trained tokens together, and of those that follow another token
  double pack_tokens = 0;              // of all packs, those to come too
  Tensor loss, correct, balance, mtp;  // float64 scalars: the weighted mean, a count, and the other two losses
  std::int64_t tokens = 0, trained_tokens = 0;

  Sums(std::span<const PackedBatch> packs, at::Device device)
      : weight(weight_of(packs)),
        loss(at::zeros({}, at::TensorOptions().dtype(kDouble).device(device))),
        correct(at::zeros_like(loss)),
        balance(at::zeros_like(loss)),
        mtp(at::zeros_like(loss)) {
    for (const auto& pack : packs) {
      next_weight += next_token_weight(pack);
      pack_tokens += static_cast<double>(pack.tokens.size());
    }
  }

  // The losses, the count and `more`, in one transfer that waits for the device.
  std::pair<LossStats, double> read(const Tensor& more) const {
    const auto found = at::stack({loss, correct, balance, mtp, more}).cpu();
    const auto* values = found.const_data_ptr<double>();
    return {{.loss = values[0],
             .router_aux_loss = values[2],
             .mtp_loss = values[3],
             .accuracy = trained_tokens > 0 ? values[1] / static_cast<double>(trained_tokens) : 0,
             .tokens = tokens,
             .trained_tokens = trained_tokens},
            values[4]};
  }
};

// The language-modelling loss of the pack, and what multi-token prediction reads of it. Without gradients where the
// decoder is not trained.
std::pair<Tensor, Tensor> decoder_loss(const Objective& objective, const Batch& batch, Sums& sums, RouterLoad* load) {
  const at::AutoGradMode grad(at::GradMode::is_enabled() && !objective.mtp_only);
  const auto& decoder = objective.decoder;
  Tensor residual;
  const auto hidden = decoder.forward(batch.tokens, batch.pack, /*state=*/nullptr, load, &residual);
  const auto [loss, predicted] = linear_cross_entropy_loss(hidden.index_select(0, batch.asked), decoder.head(),
                                                           batch.targets, batch.loss_weight / sums.weight);
  sums.loss += loss.detach().to(kDouble);
  sums.correct += (predicted == batch.targets).sum();
  sums.tokens += batch.tokens.numel();
  sums.trained_tokens += batch.asked.numel();
  return {loss, objective.mtp != nullptr && objective.mtp->reads_residual() ? residual : hidden};
}

// Adds one pack and returns its part of the weighted sum of losses for backward().
Tensor pack_loss(const Objective& objective, const PackedBatch& packed, Sums& sums) {
  const auto batch = to_batch(packed, objective.decoder.device());
  RouterLoad load;
  const bool balanced = objective.router_aux_loss_coef > 0 && !objective.mtp_only;
  auto [loss, hidden] = decoder_loss(objective, batch, sums, balanced ? &load : nullptr);
  if (load.rows > 0) {
    const auto share = static_cast<double>(packed.tokens.size()) / sums.pack_tokens;
    const auto balance = load_balancing_loss(load) * share;
    sums.balance += balance.detach().to(kDouble);
    loss = loss + objective.router_aux_loss_coef * balance;
  }
  if (objective.mtp != nullptr && sums.next_weight > 0) {
    const auto next = next_tokens(batch, packed);
    const auto ahead = objective.mtp->forward(objective.decoder, hidden, next.tokens, next.pack);
    const auto mtp = linear_cross_entropy_loss(ahead.index_select(0, next.asked), objective.decoder.head(),
                                               next.targets, next.loss_weight / sums.next_weight)
                         .loss;
    sums.mtp += mtp.detach().to(kDouble);
    loss = loss + objective.mtp_loss_scale * mtp;
  }
  return loss;
}

}  // namespace

StepStats train_step(const Objective& objective, const std::vector<PackedBatch>& packs, GradientSum& gradients,
                     AdamW& optimizer, std::int64_t step, double lr, double clip_norm) {
  Sums sums(packs, objective.decoder.device());
  if (sums.weight == 0 || (objective.mtp_only && sums.next_weight == 0)) return {};
  const auto norm = update(packs.size(), [&](std::size_t i) { return pack_loss(objective, packs[i], sums); }, gradients,
                           optimizer, {.step = step, .lr = lr, .clip_norm = clip_norm, .adapters = objective.adapters});
  const auto [losses, grad_norm] = sums.read(norm);
  const StepStats stats{losses, grad_norm};
  check_finite(stats.loss + stats.router_aux_loss + stats.mtp_loss, stats.grad_norm, gradients, step);
  gradients.clear();
  return stats;
}

void add_gradients(const Objective& objective, std::span<const PackedBatch> packs, GradientSum& gradients) {
  Sums sums(packs, objective.decoder.device());
  for (const auto& pack : packs) {
    pack_loss(objective, pack, sums).backward();
    gradients.take();
  }
}

LossStats evaluate(const Objective& objective, std::span<const PackedBatch> packs) {
  const at::NoGradGuard no_grad;
  Sums sums(packs, objective.decoder.device());
  for (const auto& pack : packs) pack_loss(objective, pack, sums);
  return sums.read(sums.loss).first;
}

}  // namespace sluice
