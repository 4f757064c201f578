// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step.h"

#include <algorithm>
#include <numeric>

#include "sluice/layers/experts.h"
#include "sluice/layers/vocabulary.h"
#include "sluice/parallel/collectives.h"
#include "sluice/train/recorded_packs.h"
#include "sluice/train/update.h"

namespace sluice {
namespace {

double weight_of(std::span<const PackedBatch> packs) {
  double sum = 0;
  for (const auto& pack : packs) sum = std::accumulate(pack.loss_weight.begin(), pack.loss_weight.end(), sum);
  return sum;
}

// A pack that adds nothing, for a rank that has none left while others have one.
PackedBatch idle_pack() {
  return {.tokens = {0}, .cu_seqlens = {0, 1}, .targets = {kIgnoredTarget}, .loss_weight = {0}, .samples = {}};
}

// Sums over packs. Those of tensors stay on the device, so that nothing waits for it before read().
struct Sums {
  double weight, next_weight = 0;  // of all trained tokens together, and of those that follow another token
  std::int64_t tokens = 0, trained_tokens = 0;  // of all packs, those to come too
  Tensor loss, correct, balance, mtp;           // float64 scalars: the weighted mean, a count, and the other two losses

  Sums(std::span<const PackedBatch> packs, at::Device device)
      : weight(weight_of(packs)),
        loss(at::zeros({}, at::TensorOptions().dtype(kDouble).device(device))),
        correct(at::zeros_like(loss)),
        balance(at::zeros_like(loss)),
        mtp(at::zeros_like(loss)) {
    for (const auto& pack : packs) {
      next_weight += next_token_weight(pack);
      tokens += std::ssize(pack.tokens);
      trained_tokens += std::ranges::count_if(pack.targets, [](auto target) { return target >= 0; });
    }
  }

  // The losses, the count, of all ranks together, and `more`, in one transfer that waits for the device.
  std::pair<LossStats, double> read(const Tensor& more, const Mesh& mesh) const {
    const auto sums = all_reduce_sum(at::stack({loss, correct, balance, mtp}), mesh.world());
    const auto found = at::cat({sums, more.view({1})}).cpu();
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

// The loss of the batch's targets by hidden states [own tokens, D], each divided by `weight`.
VocabularyLoss loss_of(const Decoder& decoder, const Tensor& hidden, const Batch& batch, double weight) {
  return vocabulary_loss(hidden.index_select(0, batch.asked), decoder.head(), batch.targets, batch.loss_weight / weight,
                         batch.asked_rows, decoder.vocab_size(), decoder.mesh().tp());
}

// The language-modelling loss of the pack, and what multi-token prediction reads of it. Without gradients where the
// decoder is not trained.
std::pair<Tensor, Tensor> decoder_loss(const Objective& objective, const Batch& batch, Sums& sums, RouterLoad* load) {
  const at::AutoGradMode grad(at::GradMode::is_enabled() && !objective.mtp_only);
  const auto& decoder = objective.decoder;
  Tensor residual;
  const auto hidden = decoder.forward(batch.tokens, batch.pack, /*state=*/nullptr, load, &residual);
  const auto [loss, predicted] = loss_of(decoder, hidden, batch, sums.weight);
  sums.loss += loss.detach().to(kDouble);
  sums.correct += (predicted == batch.targets).sum();
  return {loss, objective.mtp != nullptr && objective.mtp->reads_residual() ? residual : hidden};
}

// Adds one pack and returns its part of the weighted sum of losses for backward(), of several ranks this one's.
Tensor pack_loss(const Objective& objective, const PackedBatch& packed, Sums& sums) {
  const auto& mesh = objective.decoder.mesh();
  const auto batch = to_batch(packed, objective.decoder.device(), mesh);
  if (objective.adapters != nullptr) objective.adapters->tokens = batch.split;
  RouterLoad load;
  const bool balanced = objective.router_aux_loss_coef > 0 && !objective.mtp_only;
  auto [loss, hidden] = decoder_loss(objective, batch, sums, balanced ? &load : nullptr);
  if (load.visits.defined()) {
    const auto counted = packed.samples.empty() ? 0.0 : static_cast<double>(packed.tokens.size());
    const auto balance = load_balancing_loss(load, mesh.sequence()) * (counted / static_cast<double>(sums.tokens));
    sums.balance += balance.detach().to(kDouble);
    loss = loss + objective.router_aux_loss_coef * balance;
  }
  if (objective.mtp != nullptr && sums.next_weight > 0) {
    const auto next = next_tokens(batch, packed);
    const auto ahead = objective.mtp->forward(objective.decoder, hidden, next.tokens, next.pack);
    const auto mtp = loss_of(objective.decoder, ahead, next, sums.next_weight).loss;
    sums.mtp += mtp.detach().to(kDouble);
    loss = loss + objective.mtp_loss_scale * mtp;
  }
  return loss;
}

// The same by the pack's number, of own_packs().
Tensor pack_loss(const Objective& objective, std::span<const PackedBatch> packs, std::size_t number, Sums& sums) {
  return pack_loss(objective, number < packs.size() ? packs[number] : idle_pack(), sums);
}

}  // namespace

StepStats train_step(const Objective& objective, const std::vector<PackedBatch>& packs, GradientSum& gradients,
                     AdamW& optimizer, std::int64_t step, double lr, double clip_norm, RecordedPacks* recorded) {
  Sums sums(packs, objective.decoder.device());
  if (sums.weight == 0 || (objective.mtp_only && sums.next_weight == 0)) return {};
  const auto add_pack = [&](std::size_t i, bool last) {
    if (const auto added = recorded != nullptr ? recorded->add(packs[i], sums.weight) : std::nullopt) {
      sums.loss += added->loss;
      sums.correct += added->right;
      return added->loss;
    }
    const auto loss = pack_loss(objective, packs, i, sums);
    gradients.add(loss, last);
    return loss.detach();
  };
  const auto norm = update(packs.size(), add_pack, gradients, optimizer,
                           {.step = step, .lr = lr, .clip_norm = clip_norm, .adapters = objective.adapters});
  const auto [losses, grad_norm] = sums.read(norm, objective.decoder.mesh());
  const StepStats stats{losses, grad_norm};
  check_finite(stats.loss + stats.router_aux_loss + stats.mtp_loss, stats.grad_norm, gradients, step);
  gradients.clear();
  return stats;
}

void add_gradients(const Objective& objective, std::span<const PackedBatch> packs, GradientSum& gradients) {
  Sums sums(packs, objective.decoder.device());
  const auto own = own_packs(packs.size(), gradients.mesh());
  for (const auto i : own) gradients.add(pack_loss(objective, packs, i, sums), /*last=*/i == own.back());
}

LossStats evaluate(const Objective& objective, std::span<const PackedBatch> packs) {
  const at::NoGradGuard no_grad;
  Sums sums(packs, objective.decoder.device());
  const auto& mesh = objective.decoder.mesh();
  for (const auto i : own_packs(packs.size(), mesh)) pack_loss(objective, packs, i, sums);
  return sums.read(sums.loss, mesh).first;
}

}  // namespace sluice
