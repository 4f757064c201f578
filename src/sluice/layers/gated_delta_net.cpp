// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_delta_net.h"

#include <algorithm>
#include <numeric>

#include "sluice/layers/gated_delta_core.h"
#include "sluice/layers/tensor_parallel.h"

namespace sluice {
namespace {

std::int64_t conv_channels(const GatedDeltaNetSizes& s) {
  return 2 * s.num_key_heads * s.key_head_dim + s.num_value_heads * s.value_head_dim;
}

// By key head, each with the value heads that use it.
Split qkv_split(const GatedDeltaNetSizes& s) {
  const auto keys = s.num_key_heads * s.key_head_dim;
  return Split::heads(0, s.num_key_heads, {keys, keys, s.num_value_heads * s.value_head_dim});
}

struct GatedDeltaState : MixerState {
  GatedDeltaCoreStates of;
  void clear(const Tensor& slots) override {
    of.conv.index_fill_(0, slots, 0);
    of.recurrent.index_fill_(0, slots, 0);
  }
  void copy(const Tensor& slots, const MixerState& from, const Tensor& from_slots, std::int64_t) override {
    const auto& other = static_cast<const GatedDeltaState&>(from);
    copy_rows(of.conv, slots, other.of.conv, from_slots);
    copy_rows(of.recurrent, slots, other.of.recurrent, from_slots);
  }
};

}  // namespace

GatedDeltaNet::GatedDeltaNet(const GatedDeltaNetSizes& s)
    : sizes_(s),
      in_proj_qkv_(add("in_proj_qkv",
                       std::make_unique<Linear>(conv_channels(s), s.hidden_size, s.initializer_range, qkv_split(s)))),
      in_proj_z_(add("in_proj_z", std::make_unique<Linear>(s.num_value_heads * s.value_head_dim, s.hidden_size,
                                                           s.initializer_range, Split::heads(0, s.num_key_heads)))),
      in_proj_b_(add("in_proj_b", std::make_unique<Linear>(s.num_value_heads, s.hidden_size, s.initializer_range,
                                                           Split::heads(0, s.num_key_heads)))),
      in_proj_a_(add("in_proj_a", std::make_unique<Linear>(s.num_value_heads, s.hidden_size, s.initializer_range,
                                                           Split::heads(0, s.num_key_heads)))),
      conv_weight_(declare({.name = "conv1d.weight",
                            .shape = {conv_channels(s), 1, s.conv_kernel_dim},
                            .split = qkv_split(s),
                            .init = Init::normal(s.initializer_range)})),
      dt_bias_(declare({.name = "dt_bias",
                        .shape = {s.num_value_heads},
                        .dtype = kFloat,
                        .decay = false,
                        .split = Split::heads(0, s.num_key_heads),
                        .init = Init::constant(1)})),
      A_log_(declare({.name = "A_log",
                      .shape = {s.num_value_heads},
                      .dtype = kFloat,
                      .decay = false,
                      .split = Split::heads(0, s.num_key_heads),
                      .init = Init::log_uniform(0.01, 16)})),
      norm_weight_(
          declare({.name = "norm.weight", .shape = {s.value_head_dim}, .decay = false, .init = Init::constant(1)})),
      out_proj_(add("out_proj", std::make_unique<Linear>(s.hidden_size, s.num_value_heads * s.value_head_dim,
                                                         s.initializer_range, Split::heads(1, s.num_key_heads)))) {}

// q | k | v | z | b | a of each of the tensor ranks' tokens, side by side: the gradients come back so, and one product
// gives that of x. The weights are joined for one product, or the products, whichever is the smaller copy.
Tensor GatedDeltaNet::project(const Tensor& own, const ForwardContext& context) const {
  const std::vector<const Linear*> projections{&in_proj_qkv_, &in_proj_z_, &in_proj_b_, &in_proj_a_};
  const bool adapted = std::ranges::any_of(projections, &Linear::is_adapted);
  const auto tokens = context.mesh.tp().size() == 1 ? own.size(0) : context.split.context_count;
  if (adapted || tokens < sizes_.hidden_size) return at::cat(column_parallel(own, projections, context).y, 1);
  std::vector<Tensor> weights;
  for (const auto* projection : projections) weights.push_back(projection->weight());
  return gathered_products(own, {at::cat(weights)}, context).y[0];
}

Tensor GatedDeltaNet::forward(const Tensor& x, const ForwardContext& context, MixerState* state) const {
  const auto ranks = context.mesh.tp().size();
  const GatedDeltaCoreSizes sizes{.num_key_heads = sizes_.num_key_heads / ranks,
                                  .num_value_heads = sizes_.num_value_heads / ranks,
                                  .key_head_dim = sizes_.key_head_dim,
                                  .value_head_dim = sizes_.value_head_dim,
                                  .rms_norm_eps = sizes_.rms_norm_eps,
                                  .output_gate = sizes_.output_gate};
  const GatedDeltaCoreWeights weights{
      .conv = conv_weight_.value, .A_log = A_log_.value, .dt_bias = dt_bias_.value, .norm = norm_weight_.value};
  const auto projection = project(x, context);
  const auto out = state == nullptr ? gated_delta_core(projection, weights, context.pack, context.mesh.cp(), sizes)
                                    : gated_delta_core_cached(projection, weights, context.pack,
                                                              static_cast<GatedDeltaState*>(state)->of, sizes);
  return row_parallel(out, out_proj_, context);
}

std::unique_ptr<MixerState> GatedDeltaNet::new_state(std::int64_t slots, std::int64_t,
                                                     const at::TensorOptions& activations) const {
  auto state = std::make_unique<GatedDeltaState>();
  state->of.conv = at::zeros({slots, conv_channels(sizes_), sizes_.conv_kernel_dim - 1}, activations);
  state->of.recurrent =
      at::zeros({slots, sizes_.num_value_heads, sizes_.key_head_dim, sizes_.value_head_dim}, activations.dtype(kFloat));
  return state;
}

std::string GatedDeltaNet::why_not_on_gpu(at::ScalarType dtype) const {
  if (dtype != kBFloat16) return "the kernels of linear attention compute in bfloat16";
  if (sizes_.key_head_dim == 128 && sizes_.value_head_dim == 128) return "";
  return fmt::format(
      "the kernels of linear attention take head dims of 128, and the model's are {} (key) and {} (value)",
      sizes_.key_head_dim, sizes_.value_head_dim);
}

// The recurrence as its equation reads: S^T k, the outer product k (..)^T and S^T q are a multiply-add for each element
// of the state.
void GatedDeltaNet::count_operations(std::span<const std::int64_t> lengths, Operations& operations) const {
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  const auto& s = sizes_;
  const auto states = static_cast<double>(s.num_value_heads * s.key_head_dim * s.value_head_dim);
  for (const auto* projection : {&in_proj_qkv_, &in_proj_z_, &in_proj_b_, &in_proj_a_, &out_proj_}) {
    operations["linear attention, projections"] += projection->operations(tokens);
  }
  operations["linear attention, convolution"] +=
      2.0 * tokens * static_cast<double>(conv_channels(s) * s.conv_kernel_dim);
  operations["linear attention, gated delta rule"] += 3 * 2.0 * tokens * states;
}

}  // namespace sluice
