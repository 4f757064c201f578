// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/batch.h"

namespace sluice {

Batch to_batch(const PackedBatch& packed) {
  std::vector<std::int64_t> lengths;
  for (std::size_t n = 0; n + 1 < packed.cu_seqlens.size(); ++n) {
    lengths.push_back(packed.cu_seqlens[n + 1] - packed.cu_seqlens[n]);
  }
  return {.pack = make_pack(std::move(lengths)),
          .tokens = at::tensor(packed.tokens, at::TensorOptions().dtype(kInt)).to(kLong),
          .targets = at::tensor(packed.targets, at::TensorOptions().dtype(kInt)).to(kLong),
          .loss_weight = at::tensor(packed.loss_weight, at::TensorOptions().dtype(kFloat))};
}

}  // namespace sluice
