// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/update.h"

#include <cmath>
#include <limits>

#include "sluice/core/error.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

// What clipping multiplies gradients by; NaN, so that nothing is updated, where loss or norm is not finite.
Tensor gradient_scale(const Tensor& loss, const Tensor& norm, double clip_norm) {
  const auto scale = clip_norm > 0 ? (clip_norm / (norm + 1e-6)).clamp_max(1.0) : at::ones_like(norm);
  return scale.masked_fill((loss + norm).isfinite().logical_not(), std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

std::vector<std::size_t> own_packs(std::size_t packs, const Mesh& mesh) {
  const auto dp = static_cast<std::size_t>(mesh.sizes().dp);
  const auto rank = static_cast<std::size_t>(mesh.data().rank() / mesh.cp().size());
  std::vector<std::size_t> own;
  for (std::size_t first = 0; first < packs; first += dp) own.push_back(first + rank);
  return own;
}

Tensor update(std::size_t packs, const AddPack& add_pack, GradientSum& gradients, AdamW& optimizer,
              const UpdateSettings& settings) {
  const auto& mesh = gradients.mesh();
  Tensor sum;
  const auto own = own_packs(packs, mesh);
  for (const auto i : own) {
    if (settings.adapters) settings.adapters->pass = (static_cast<std::uint64_t>(settings.step) << 24) + i;
    const auto value = add_pack(i, /*last=*/i == own.back()).to(kDouble);
    sum = sum.defined() ? sum + value : value;
  }
  if (settings.adapters) settings.adapters->pass.reset();
  const auto norm = gradients.norm();
  const auto loss_of_all = all_reduce_sum(sum, mesh.world());
  optimizer.step(gradients, settings.lr, gradient_scale(loss_of_all, norm, settings.clip_norm));
  return norm;
}

void check_finite(double loss, double grad_norm, const GradientSum& gradients, std::int64_t step) {
  if (std::isfinite(loss) && std::isfinite(grad_norm)) return;
  const auto first = gradients.first_not_finite();
  fail(ExitCode::kNan,
       "step {}: loss {}, gradient norm {}{}; nothing was updated, and the checkpoints before are good.\n"
       "  Lower optim.lr or optim.clip_norm, or look at this step's samples.",
       step, loss, grad_norm,
       first.empty() ? std::string() : fmt::format("; the first gradient that is not finite is that of {}", first));
}

}  // namespace sluice
