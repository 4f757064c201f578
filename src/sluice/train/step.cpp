// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step.h"

#include <cmath>
#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {
namespace {

double weight_of(std::span<const PackedBatch> packs) {
  double sum = 0;
  for (const auto& pack : packs) sum = std::accumulate(pack.loss_weight.begin(), pack.loss_weight.end(), sum);
  return sum;
}

// Adds the loss of one pack to `stats`, divided by `weight`, and returns it for backward().
Tensor pack_loss(const Decoder& model, const PackedBatch& packed, double weight, LossStats& stats) {
  const auto batch = to_batch(packed);
  const auto [nll, predicted] =
      linear_cross_entropy(model.forward(batch.tokens, batch.pack), model.head(), batch.targets);
  const auto loss = (nll * batch.loss_weight).sum() / weight;
  const auto asked = batch.targets >= 0;
  stats.loss += loss.item<double>();
  stats.tokens += batch.tokens.numel();
  stats.trained_tokens += asked.sum().item<std::int64_t>();
  stats.accuracy += (asked & (predicted == batch.targets)).sum().item<double>();  // a count until all packs are in
  return loss;
}

void finish(LossStats& stats) {
  if (stats.trained_tokens > 0) stats.accuracy /= static_cast<double>(stats.trained_tokens);
}

void check_finite(const StepStats& stats, const GradientSum& gradients, std::int64_t step) {
  if (std::isfinite(stats.loss) && std::isfinite(stats.grad_norm)) return;
  const auto first = gradients.first_not_finite();
  fail(ExitCode::kNan,
       "step {}: loss {}, gradient norm {}{}; nothing was updated, and the checkpoints before are good.\n"
       "  Lower optim.lr or optim.clip_norm, or look at this step's samples.",
       step, stats.loss, stats.grad_norm,
       first.empty() ? std::string() : fmt::format("; the first gradient that is not finite is that of {}", first));
}

}  // namespace

StepStats train_step(const Decoder& model, const std::vector<PackedBatch>& packs, GradientSum& gradients,
                     AdamW& optimizer, std::int64_t step, double lr, double clip_norm) {
  StepStats stats;
  const auto weight = weight_of(packs);
  if (weight == 0) return stats;
  for (const auto& pack : packs) {
    pack_loss(model, pack, weight, stats).backward();
    gradients.take();
  }
  finish(stats);
  stats.grad_norm = gradients.norm();
  check_finite(stats, gradients, step);
  const auto scale = clip_norm > 0 ? std::min(1.0, clip_norm / (stats.grad_norm + 1e-6)) : 1.0;
  optimizer.step(gradients, lr, scale);
  gradients.clear();
  return stats;
}

LossStats evaluate(const Decoder& model, std::span<const PackedBatch> packs) {
  const at::NoGradGuard no_grad;
  LossStats stats;
  const auto weight = weight_of(packs);
  for (const auto& pack : packs) pack_loss(model, pack, weight, stats);
  finish(stats);
  return stats;
}

}  // namespace sluice
