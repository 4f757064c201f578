// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step.h"

#include <cmath>
#include <limits>
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

// Sums over packs. Those of tensors stay on the device, so that nothing waits for it before read().
struct Sums {
  double weight;         // of all trained tokens together
  Tensor loss, correct;  // float64 scalars: the weighted mean, and a count
  std::int64_t tokens = 0, trained_tokens = 0;

  Sums(std::span<const PackedBatch> packs, at::Device device)
      : weight(weight_of(packs)),
        loss(at::zeros({}, at::TensorOptions().dtype(kDouble).device(device))),
        correct(at::zeros_like(loss)) {}

  LossStats read(double loss_value, double correct_value) const {
    return {.loss = loss_value,
            .accuracy = trained_tokens > 0 ? correct_value / static_cast<double>(trained_tokens) : 0,
            .tokens = tokens,
            .trained_tokens = trained_tokens};
  }
};

// Adds one pack and returns its part of the loss for backward().
Tensor pack_loss(const Decoder& model, const PackedBatch& packed, Sums& sums) {
  const auto batch = to_batch(packed, model.device());
  const auto hidden = model.forward(batch.tokens, batch.pack).index_select(0, batch.asked);
  const auto [loss, predicted] =
      linear_cross_entropy_loss(hidden, model.head(), batch.targets, batch.loss_weight / sums.weight);
  sums.loss += loss.detach().to(kDouble);
  sums.correct += (predicted == batch.targets).sum();
  sums.tokens += batch.tokens.numel();
  sums.trained_tokens += batch.asked.numel();
  return loss;
}

// What clipping multiplies gradients by; NaN, so that nothing is updated, where loss or norm is not finite.
Tensor gradient_scale(const Tensor& loss, const Tensor& norm, double clip_norm) {
  const auto scale = clip_norm > 0 ? (clip_norm / (norm + 1e-6)).clamp_max(1.0) : at::ones_like(norm);
  return scale.masked_fill((loss + norm).isfinite().logical_not(), std::numeric_limits<double>::quiet_NaN());
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
  Sums sums(packs, model.device());
  if (sums.weight == 0) return {};
  for (const auto& pack : packs) {
    pack_loss(model, pack, sums).backward();
    gradients.take();
  }
  const auto norm = gradients.norm();
  optimizer.step(gradients, lr, gradient_scale(sums.loss, norm, clip_norm));
  const auto found = at::stack({sums.loss, sums.correct, norm}).cpu();  // waits for the device
  const auto* values = found.const_data_ptr<double>();
  const StepStats stats{sums.read(values[0], values[1]), values[2]};
  check_finite(stats, gradients, step);
  gradients.clear();
  return stats;
}

LossStats evaluate(const Decoder& model, std::span<const PackedBatch> packs) {
  const at::NoGradGuard no_grad;
  Sums sums(packs, model.device());
  for (const auto& pack : packs) pack_loss(model, pack, sums);
  const auto found = at::stack({sums.loss, sums.correct}).cpu();
  return sums.read(found.const_data_ptr<double>()[0], found.const_data_ptr<double>()[1]);
}

}  // namespace sluice
