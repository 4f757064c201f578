// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/block_indexer.h"
#include "sluice/layers/linear.h"
#include "sluice/layers/mixer.h"
#include "sluice/layers/norms.h"

namespace sluice {

struct GatedAttentionSizes {
  std::int64_t hidden_size;
  std::int64_t num_attention_heads, num_key_value_heads, head_dim;
  double rms_norm_eps;
  double initializer_range;
};

// Softmax attention with query and key norms, partial rotary embedding and a sigmoid gate on its output (Qwen3-Next and
// later). With an indexer each query attends to the blocks of keys that it chooses, beside the open last one
// (Qwen3.8-Flash-Next). Hq query heads, Hkv key-value heads, d head dim: a tensor rank's some of them.
class GatedAttention : public Mixer {
 public:
  explicit GatedAttention(const GatedAttentionSizes& sizes, std::unique_ptr<BlockIndexer> indexer = nullptr);
  Tensor forward(const Tensor& x, const ForwardContext& context, MixerState* state) const override;
  std::unique_ptr<MixerState> new_state(std::int64_t slots, std::int64_t capacity,
                                        const at::TensorOptions& activations) const override;
  std::string why_not_on_gpu(at::ScalarType dtype) const override;
  bool is_recordable() const override;
  void count_operations(std::span<const std::int64_t> lengths, Operations& operations) const override;

 private:
  GatedAttentionSizes sizes_;
  Linear& q_proj_;  // [2 Hq d, D]: rows of each head are its query, then its gate
  Linear &k_proj_, &v_proj_, &o_proj_;
  ZeroCenteredRmsNorm &q_norm_, &k_norm_;
  BlockIndexer* indexer_;  // none: each query attends to all that it sees
};

}  // namespace sluice
