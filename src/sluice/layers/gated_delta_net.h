// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"
#include "sluice/layers/linear.h"
#include "sluice/layers/mixer.h"

namespace sluice {

struct GatedDeltaNetSizes {
  std::int64_t hidden_size;
  std::int64_t num_key_heads, num_value_heads;  // value head h uses key head h / (num_value_heads / num_key_heads)
  std::int64_t key_head_dim, value_head_dim;
  std::int64_t conv_kernel_dim;
  double rms_norm_eps;
  double initializer_range;
  GateActivation output_gate = GateActivation::kSilu;
};

// Linear attention by the gated delta rule (Yang, Kautz, Hatamizadeh 2024) as the Qwen3.5 families lay it out: flat
// projections q | k | v, each head-major, and separate z, b, a.
// Kd = key heads x key dim, Vd = value heads x value dim. A tensor rank has some of the key heads, with the value heads
// that use them.
class GatedDeltaNet : public Mixer {
 public:
  explicit GatedDeltaNet(const GatedDeltaNetSizes& sizes);
  Tensor forward(const Tensor& x, const ForwardContext& context, MixerState* state) const override;
  std::unique_ptr<MixerState> new_state(std::int64_t slots, std::int64_t capacity,
                                        const at::TensorOptions& activations) const override;
  std::string why_not_on_gpu(at::ScalarType dtype) const override;
  bool is_recordable() const override { return true; }
  void count_operations(std::span<const std::int64_t> lengths, Operations& operations) const override;

 private:
  Tensor project(const Tensor& own, const ForwardContext& context) const;

  GatedDeltaNetSizes sizes_;
  Linear &in_proj_qkv_, &in_proj_z_, &in_proj_b_, &in_proj_a_;  // [2 Kd + Vd, D], [Vd, D], [Hv, D], [Hv, D]
  Parameter &conv_weight_, &dt_bias_, &A_log_;                  // [2 Kd + Vd, 1, kernel], [Hv], [Hv]
  Parameter& norm_weight_;                                      // [V], one for all heads
  Linear& out_proj_;                                            // [D, Vd]
};

}  // namespace sluice
