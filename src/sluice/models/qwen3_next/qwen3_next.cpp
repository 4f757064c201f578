// SPDX-License-Identifier: Apache-2.0
// Qwen3-Next: gated delta net and gated attention layers in a fixed pattern, a sparse block in each or in every n-th of
// them. Its checkpoints interleave the delta net's projections by key head and hold experts one by one. Architecture:
// docs/models.md.
#include <algorithm>

#include "sluice/models/delta_hybrid.h"
#include "sluice/models/family.h"
#include "sluice/models/qwen3_next/presets.h"

namespace sluice {
namespace {

// Which layers have a sparse block.
std::vector<bool> read_sparse_layers(const ConfigReader& text, std::size_t layers) {
  const auto step = text.size("decoder_sparse_step", 1);
  const auto dense = text.integers("mlp_only_layers");
  std::vector<bool> sparse;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(layers); ++i) {
    sparse.push_back((i + 1) % step == 0 && std::ranges::find(dense, i) == dense.end());
  }
  return sparse;
}

// in_proj_qkvz: for each key head its q, its k, and v and z of the value heads that read it. in_proj_ba: b and a of
// those value heads.
std::vector<WeightRules::Interleaved> interleaved_projections(const GatedDeltaNetSizes& delta) {
  const auto key = delta.key_head_dim, keys = delta.num_key_heads * delta.key_head_dim;
  const auto heads = delta.num_value_heads / delta.num_key_heads, value = heads * delta.value_head_dim;
  return {{.tensor = "linear_attn.in_proj_qkvz.weight",
           .groups = delta.num_key_heads,
           .parts = {{"linear_attn.in_proj_qkv.weight", 0, key},
                     {"linear_attn.in_proj_qkv.weight", keys, key},
                     {"linear_attn.in_proj_qkv.weight", 2 * keys, value},
                     {"linear_attn.in_proj_z.weight", 0, value}}},
          {.tensor = "linear_attn.in_proj_ba.weight",
           .groups = delta.num_key_heads,
           .parts = {{"linear_attn.in_proj_b.weight", 0, heads}, {"linear_attn.in_proj_a.weight", 0, heads}}}};
}

Model build(const nlohmann::json& config, const std::string& where, const BuildOptions& options) {
  const ConfigReader text(config, where);
  text.require("output_gate_type", {"swish", "silu"});
  const auto c = read_hybrid_config(
      text, {.vocab_size = 151936, .hidden_size = 2048, .num_hidden_layers = 48, .num_key_value_heads = 2});
  const auto moe = read_moe_sizes(text, c, 512, 10, text.flag("norm_topk_prob", true));
  const auto intermediate_size = text.size("intermediate_size", 5632);
  const auto sparse = read_sparse_layers(text, c.is_full_attention.size());
  auto rules = hybrid_weight_rules(c);
  rules.pieces = expert_pieces(/*fresh=*/true);
  rules.interleaved = interleaved_projections(c.delta);
  const auto feed_forward = [&](std::int64_t layer) -> std::unique_ptr<FeedForward> {
    if (sparse[layer]) return std::make_unique<SparseMoe>(moe);
    return std::make_unique<SwiGlu>(c.hidden_size, intermediate_size, c.initializer_range);
  };
  return {.decoder = std::make_unique<Decoder>(hybrid_decoder(c, feed_forward)),
          .weights = std::move(rules),
          .router_aux_loss_coef = read_router_aux_loss_coef(text),
          .mtp = options.mtp ? hybrid_mtp(c, std::make_unique<SparseMoe>(moe)) : nullptr};
}

const RegisterFamily registered(
    {.name = "qwen3_next", .model_types = {"qwen3_next"}, .presets = qwen3_next_presets(), .build = build});

}  // namespace
}  // namespace sluice
