// SPDX-License-Identifier: Apache-2.0
// For tests of this folder.
#pragma once

#include "sluice/core/tensor.h"
#include "sluice/data/packing.h"

namespace sluice {

// About a third of the tokens is not trained.
inline PackedBatch random_pack(const std::vector<std::int64_t>& lengths, std::uint64_t seed) {
  at::manual_seed(seed);
  PackedBatch pack{.tokens = {}, .cu_seqlens = {0}, .targets = {}, .loss_weight = {}, .samples = {}};
  for (const auto length : lengths) {
    const auto ids = at::randint(3, 1000, {length}), trained = at::rand({length}) < 0.7;
    for (std::int64_t t = 0; t < length; ++t) {
      const bool has_target = t + 1 < length && trained[t].item<bool>();
      pack.tokens.push_back(ids[t].item<std::int32_t>());
      pack.targets.push_back(has_target ? ids[t + 1].item<std::int32_t>() : kIgnoredTarget);
      pack.loss_weight.push_back(has_target ? 1.0F : 0.0F);
    }
    pack.cu_seqlens.push_back(static_cast<std::int32_t>(pack.tokens.size()));
    pack.samples.push_back(std::ssize(pack.samples));
  }
  return pack;
}

inline double relative(const Tensor& x, const Tensor& y) {
  return ((x - y).to(kDouble).norm() / y.to(kDouble).norm().clamp_min(1e-30)).item<double>();
}

// Sums of a few thousand products in another order: each rounding is 6e-8, and they partly cancel.
inline constexpr double kOtherOrder = 1e-5;

}  // namespace sluice
