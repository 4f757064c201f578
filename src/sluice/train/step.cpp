// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step.h"

#include <algorithm>
#include <numeric>
#include <optional>

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

// Sums over packs. Those of losses stay on the device, so that nothing waits for it before read().
struct Sums {
  double weight, next_weight = 0;  // of all trained tokens together, and of those that follow another token
  std::int64_t tokens = 0, trained_tokens = 0;  // of all packs, those to come too
  Tensor losses;                                // [4] float64: PackLosses::parts

  Sums(std::span<const PackedBatch> packs, at::Device device)
      : weight(weight_of(packs)), losses(at::zeros({4}, at::TensorOptions().dtype(kDouble).device(device))) {
    for (const auto& pack : packs) {
      next_weight += next_token_weight(pack);
      tokens += std::ssize(pack.tokens);
      trained_tokens += std::ranges::count_if(pack.targets, [](auto target) { return target >= 0; });
    }
  }

  // The losses, the count, of all ranks together, and `more`, in one transfer that waits for the device.
  std::pair<LossStats, double> read(const Tensor& more, const Mesh& mesh) const {
    const auto found = at::cat({all_reduce_sum(losses, mesh.world()), more.view({1})}).cpu();
    const auto* values = found.const_data_ptr<double>();
    return {{.loss = values[0],
             .router_aux_loss = values[1],
             .mtp_loss = values[2],
             .accuracy = trained_tokens > 0 ? values[3] / static_cast<double>(trained_tokens) : 0,
             .tokens = tokens,
             .trained_tokens = trained_tokens},
            values[4]};
  }
};

// The loss of the batch's targets by hidden states [own tokens, D].
VocabularyLoss loss_of(const Decoder& decoder, const Tensor& hidden, const Batch& batch) {
  return vocabulary_loss(hidden.index_select(0, batch.asked), decoder.head(), batch.targets, batch.loss_weight,
                         batch.asked_rows, decoder.vocab_size(), decoder.mesh().tp());
}

// The language-modelling loss of the pack, and what multi-token prediction reads of it. Without gradients where the
// decoder is not trained.
std::pair<VocabularyLoss, Tensor> decoder_loss(const Objective& objective, const Batch& batch, RouterLoad* load) {
  const at::AutoGradMode grad(at::GradMode::is_enabled() && !objective.mtp_only);
  Tensor residual;
  const auto hidden = objective.decoder.forward(batch.tokens, batch.pack, /*state=*/nullptr, load, &residual);
  return {loss_of(objective.decoder, hidden, batch),
          objective.mtp != nullptr && objective.mtp->reads_residual() ? residual : hidden};
}

// Of one of the step's packs by its number, of own_packs().
PackLosses losses_of(const Objective& objective, std::span<const PackedBatch> packs, std::size_t number,
                     const Sums& sums) {
  const auto packed = number < packs.size() ? packs[number] : idle_pack();
  auto batch = to_batch(packed, objective.decoder.device(), objective.decoder.mesh());
  batch.loss_weight.div_(sums.weight);
  std::optional<Batch> next;
  if (objective.mtp != nullptr && sums.next_weight > 0) {
    next = next_tokens(batch, packed);
    next->loss_weight.div_(sums.next_weight);
  }
  const auto counted = packed.samples.empty() ? 0.0 : static_cast<double>(packed.tokens.size());
  return pack_losses(objective, batch, next ? &*next : nullptr, counted / static_cast<double>(sums.tokens));
}

}  // namespace

PackLosses pack_losses(const Objective& objective, const Batch& batch, const Batch* next, double share) {
  const auto& decoder = objective.decoder;
  if (objective.adapters != nullptr) objective.adapters->tokens = batch.split;
  RouterLoad load;
  const bool balanced = objective.router_aux_loss_coef > 0 && !objective.mtp_only;
  const auto [language, hidden] = decoder_loss(objective, batch, balanced ? &load : nullptr);
  const auto correct = (language.predicted == batch.targets).bitwise_and(batch.targets != kIgnoredTarget).sum();
  auto minimised = language.loss, balance = at::zeros_like(correct), mtp = balance;
  if (load.visits.defined()) {
    balance = load_balancing_loss(load, decoder.mesh().sequence()) * share;
    minimised = minimised + objective.router_aux_loss_coef * balance;
  }
  if (next != nullptr) {
    mtp = loss_of(decoder, objective.mtp->forward(decoder, hidden, next->tokens, next->pack), *next).loss;
    minimised = minimised + objective.mtp_loss_scale * mtp;
  }
  const auto part = [](const Tensor& x) { return x.detach().to(kDouble); };
  return {.minimised = minimised, .parts = at::stack({part(language.loss), part(balance), part(mtp), part(correct)})};
}

// Names all that pack_losses() may do in which the host takes part or a pack's filling would count; what is added there
// is to be looked at here.
std::string why_not_recorded(const Objective& objective) {
  if (objective.decoder.mesh().world().size() > 1) return "processes exchange tensors within it";
  if (!objective.decoder.is_recordable()) return "the host takes part in this model's layers";
  if (objective.mtp != nullptr) return "multi-token prediction is trained";
  if (objective.router_aux_loss_coef > 0) return "the load-balancing loss counts every token of a pack";
  if (objective.adapters != nullptr && objective.adapters->probability > 0) return "the host draws what adapters drop";
  return "";
}

StepStats train_step(const Objective& objective, const std::vector<PackedBatch>& packs, GradientSum& gradients,
                     AdamW& optimizer, std::int64_t step, double lr, double clip_norm, RecordedPacks* recorded) {
  Sums sums(packs, objective.decoder.device());
  if (sums.weight == 0 || (objective.mtp_only && sums.next_weight == 0)) return {};
  const auto add_pack = [&](std::size_t i, bool last) {
    const auto losses =
        recorded != nullptr ? recorded->add(packs[i], sums.weight) : losses_of(objective, packs, i, sums);
    if (recorded == nullptr) gradients.add(losses.minimised, last);
    sums.losses += losses.parts;
    return losses.minimised.detach();
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
  for (const auto i : own) gradients.add(losses_of(objective, packs, i, sums).minimised, /*last=*/i == own.back());
}

LossStats evaluate(const Objective& objective, std::span<const PackedBatch> packs) {
  const at::NoGradGuard no_grad;
  Sums sums(packs, objective.decoder.device());
  const auto& mesh = objective.decoder.mesh();
  for (const auto i : own_packs(packs.size(), mesh)) sums.losses += losses_of(objective, packs, i, sums).parts;
  return sums.read(sums.losses[0], mesh).first;
}

}  // namespace sluice
