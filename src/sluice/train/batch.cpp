// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/batch.h"

namespace sluice {

Batch to_batch(const PackedBatch& packed, at::Device device) {
  std::vector<std::int64_t> lengths, asked, targets;
  std::vector<float> weights;
  for (std::size_t n = 0; n + 1 < packed.cu_seqlens.size(); ++n) {
    lengths.push_back(packed.cu_seqlens[n + 1] - packed.cu_seqlens[n]);
  }
  for (std::size_t t = 0; t < packed.targets.size(); ++t) {
    if (packed.targets[t] < 0) continue;
    asked.push_back(static_cast<std::int64_t>(t));
    targets.push_back(packed.targets[t]);
    weights.push_back(packed.loss_weight[t]);
  }
  const auto there = [&](const auto& values, at::ScalarType type) {
    return at::tensor(values, at::TensorOptions().dtype(type)).to(device, /*non_blocking=*/true);
  };
  return {.pack = make_pack(std::move(lengths), {}, {}, device),
          .tokens = there(packed.tokens, kInt).to(kLong),
          .asked = there(asked, kLong),
          .targets = there(targets, kLong),
          .loss_weight = there(weights, kFloat)};
}

}  // namespace sluice
