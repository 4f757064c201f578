// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_delta_net.h"

#include <cmath>

#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"
#include "sluice/layers/slots.h"

namespace sluice {
namespace {

std::int64_t conv_channels(const GatedDeltaNetSizes& s) {
  return 2 * s.num_key_heads * s.key_head_dim + s.num_value_heads * s.value_head_dim;
}

struct GatedDeltaState : MixerState {
  Tensor conv;       // [slots, 2 Kd + Vd, kernel - 1], oldest first
  Tensor recurrent;  // [slots, Hv, K, V] float32
  void clear(std::int64_t slot) override {
    conv[slot].zero_();
    recurrent[slot].zero_();
  }
};

}  // namespace

GatedDeltaNet::GatedDeltaNet(const GatedDeltaNetSizes& s)
    : sizes_(s),
      in_proj_qkv_(add("in_proj_qkv", std::make_unique<Linear>(conv_channels(s), s.hidden_size, s.initializer_range))),
      in_proj_z_(add("in_proj_z", std::make_unique<Linear>(s.num_value_heads * s.value_head_dim, s.hidden_size,
                                                           s.initializer_range))),
      in_proj_b_(add("in_proj_b", std::make_unique<Linear>(s.num_value_heads, s.hidden_size, s.initializer_range))),
      in_proj_a_(add("in_proj_a", std::make_unique<Linear>(s.num_value_heads, s.hidden_size, s.initializer_range))),
      conv_weight_(declare({.name = "conv1d.weight",
                            .shape = {conv_channels(s), 1, s.conv_kernel_dim},
                            .init = Init::normal(s.initializer_range)})),
      dt_bias_(declare({.name = "dt_bias",
                        .shape = {s.num_value_heads},
                        .dtype = kFloat,
                        .decay = false,
                        .init = Init::constant(1)})),
      A_log_(declare({.name = "A_log",
                      .shape = {s.num_value_heads},
                      .dtype = kFloat,
                      .decay = false,
                      .init = Init::log_uniform(0.01, 16)})),
      norm_(add("norm", std::make_unique<GatedRmsNorm>(s.value_head_dim, s.rms_norm_eps, s.output_gate))),
      out_proj_(add("out_proj", std::make_unique<Linear>(s.hidden_size, s.num_value_heads * s.value_head_dim,
                                                         s.initializer_range))) {}

Tensor GatedDeltaNet::forward(const Tensor& x, const ForwardContext& context, MixerState* state) const {
  auto* cache = static_cast<GatedDeltaState*>(state);
  const auto& pack = context.pack;
  const auto key_width = sizes_.num_key_heads * sizes_.key_head_dim;
  const auto value_width = sizes_.num_value_heads * sizes_.value_head_dim;

  const auto conv = causal_conv(in_proj_qkv_.forward(x), conv_weight_.value, pack.cu_seqlens,
                                cache ? std::optional(read_slots(cache->conv, pack)) : std::nullopt, /*silu=*/true);
  const auto parts = conv.out.split_with_sizes({key_width, key_width, value_width}, 1);
  const auto q = parts[0].unflatten(1, {sizes_.num_key_heads, sizes_.key_head_dim});      // [T, Hk, K]
  const auto k = parts[1].unflatten(1, {sizes_.num_key_heads, sizes_.key_head_dim});      // [T, Hk, K]
  const auto v = parts[2].unflatten(1, {sizes_.num_value_heads, sizes_.value_head_dim});  // [T, Hv, V]

  const auto beta = in_proj_b_.forward(x).sigmoid().to(kFloat);  // [T, Hv], rounded in the activations' dtype
  const auto a = in_proj_a_.forward(x).to(kFloat);
  const auto g =
      -A_log_.value.exp() * at::softplus(a + dt_bias_.value);  // [T, Hv] float32: small decays vanish in bf16

  const auto delta = gated_delta_rule(q, k, v, g, beta, pack.cu_seqlens,
                                      cache ? std::optional(read_slots(cache->recurrent, pack)) : std::nullopt,
                                      1 / std::sqrt(static_cast<double>(sizes_.key_head_dim)), /*qk_l2norm=*/true);
  if (cache != nullptr) {
    write_slots(cache->conv, pack, conv.final_state);
    write_slots(cache->recurrent, pack, delta.final_state);
  }
  const auto z = in_proj_z_.forward(x).unflatten(1, {sizes_.num_value_heads, sizes_.value_head_dim});
  return out_proj_.forward(norm_.forward(delta.out, z).flatten(1));
}

std::unique_ptr<MixerState> GatedDeltaNet::new_state(std::int64_t slots, std::int64_t, at::ScalarType dtype) const {
  auto state = std::make_unique<GatedDeltaState>();
  state->conv = at::zeros({slots, conv_channels(sizes_), sizes_.conv_kernel_dim - 1}, at::TensorOptions().dtype(dtype));
  state->recurrent = at::zeros({slots, sizes_.num_value_heads, sizes_.key_head_dim, sizes_.value_head_dim},
                               at::TensorOptions().dtype(kFloat));
  return state;
}

}  // namespace sluice
