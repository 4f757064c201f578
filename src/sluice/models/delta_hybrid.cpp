// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/delta_hybrid.h"

#include <fmt/format.h>

namespace sluice {
namespace {

std::vector<bool> read_layer_types(const ConfigReader& text, const HybridDefaults& defaults) {
  const auto layers = text.size("num_hidden_layers", defaults.num_hidden_layers, kMostParts);
  const auto interval = text.size("full_attention_interval", 4);
  const auto types = text.strings("layer_types");
  if (!types.empty() && static_cast<std::int64_t>(types.size()) != layers) {
    text.fail_at("layer_types", fmt::format("{} entries, one for each of num_hidden_layers", layers));
  }
  std::vector<bool> full;
  for (std::int64_t i = 0; i < layers; ++i) {
    if (types.empty()) {
      full.push_back((i + 1) % interval == 0);
    } else if (types[i] == "linear_attention") {
      full.push_back(false);
    } else if (types[i] == "full_attention" || types[i] == defaults.attention_layer_type) {
      full.push_back(true);
    } else {
      text.fail_at("layer_types", "full_attention or linear_attention in each place");
    }
  }
  return full;
}

RotaryParts read_rotary(const ConfigReader& text, std::int64_t head_dim) {
  const auto rope = text.has("rope_parameters") ? text.object("rope_parameters") : text.object("rope_scaling");
  rope.require("rope_type", {"default"});
  rope.require("type", {"default"});
  const auto theta = rope.number("rope_theta", text.number("rope_theta", 10000));
  const auto factor = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 0.25));
  const auto part = factor > 0 && factor <= 1 ? static_cast<double>(head_dim) * factor : 0;
  const auto dim = static_cast<std::int64_t>(part);
  if (theta <= 1) rope.fail_at("rope_theta", "a number above 1");
  if (dim < 2 || dim % 2 != 0) {
    rope.fail_at("partial_rotary_factor", fmt::format("an even part of head_dim = {}", head_dim));
  }
  return {.theta = theta, .dim = dim};
}

std::unique_ptr<PreNorm> pre_norm(const HybridConfig& c) {
  return std::make_unique<PreNorm>(c.hidden_size, c.rms_norm_eps);
}

}  // namespace

ConfigReader text_reader(const ConfigReader& top) { return top.has("text_config") ? top.object("text_config") : top; }

HybridConfig read_hybrid_config(const ConfigReader& top, const HybridDefaults& defaults) {
  const auto text = text_reader(top);
  text.require("hidden_act", {"silu"});
  text.require("attention_bias", {false});
  text.require("attention_dropout", {0.0, 0});
  text.require("attn_output_gate", {true});
  text.require("mamba_ssm_dtype", {"float32"});
  HybridConfig c{};
  c.vocab_size = text.size("vocab_size", defaults.vocab_size, 1 << 24);
  c.hidden_size = text.size("hidden_size", defaults.hidden_size);
  c.rms_norm_eps = text.number("rms_norm_eps", 1e-6);
  c.initializer_range = text.number("initializer_range", 0.02);
  if (c.rms_norm_eps <= 0) text.fail_at("rms_norm_eps", "a number above 0");
  if (c.initializer_range < 0) text.fail_at("initializer_range", "a number of at least 0");
  c.is_full_attention = read_layer_types(text, defaults);
  c.attention = {.hidden_size = c.hidden_size,
                 .num_attention_heads = text.size("num_attention_heads", 16, kMostParts),
                 .num_key_value_heads = text.size("num_key_value_heads", defaults.num_key_value_heads, kMostParts),
                 .head_dim = text.size("head_dim", 256, kMostParts),
                 .rms_norm_eps = c.rms_norm_eps,
                 .initializer_range = c.initializer_range};
  c.delta = {.hidden_size = c.hidden_size,
             .num_key_heads = text.size("linear_num_key_heads", 16, kMostParts),
             .num_value_heads = text.size("linear_num_value_heads", 32, kMostParts),
             .key_head_dim = text.size("linear_key_head_dim", 128, kMostParts),
             .value_head_dim = text.size("linear_value_head_dim", 128, kMostParts),
             .conv_kernel_dim = text.size("linear_conv_kernel_dim", 4, 64),
             .rms_norm_eps = c.rms_norm_eps,
             .initializer_range = c.initializer_range};
  if (c.attention.num_attention_heads % c.attention.num_key_value_heads != 0) {
    text.fail_at("num_key_value_heads",
                 fmt::format("a divisor of num_attention_heads = {}", c.attention.num_attention_heads));
  }
  if (c.delta.num_value_heads % c.delta.num_key_heads != 0) {
    text.fail_at("linear_num_key_heads",
                 fmt::format("a divisor of linear_num_value_heads = {}", c.delta.num_value_heads));
  }
  c.rotary = read_rotary(text, c.attention.head_dim);
  c.tie_word_embeddings = top.flag("tie_word_embeddings", text.flag("tie_word_embeddings", false));
  return c;
}

SparseMoeSizes read_moe_sizes(const ConfigReader& text, const HybridConfig& c, std::int64_t num_experts,
                              std::int64_t num_experts_per_tok, bool norm_topk_prob) {
  SparseMoeSizes sizes{.hidden_size = c.hidden_size,
                       .num_experts = text.size("num_experts", num_experts, 1 << 16),
                       .num_experts_per_tok = text.size("num_experts_per_tok", num_experts_per_tok),
                       .moe_intermediate_size = text.size("moe_intermediate_size", 512),
                       .shared_expert_intermediate_size = text.size("shared_expert_intermediate_size", 512),
                       .norm_topk_prob = norm_topk_prob,
                       .initializer_range = c.initializer_range};
  if (sizes.num_experts_per_tok > sizes.num_experts) {
    text.fail_at("num_experts_per_tok", fmt::format("at most num_experts = {}", sizes.num_experts));
  }
  return sizes;
}

double read_router_aux_loss_coef(const ConfigReader& text) {
  const auto coefficient = text.number("router_aux_loss_coef", 0.001);
  if (coefficient < 0) text.fail_at("router_aux_loss_coef", "a number of at least 0");
  return text.flag("output_router_logits", false) ? coefficient : 0;
}

BlockParts hybrid_block(const HybridConfig& c, bool is_full_attention, std::unique_ptr<FeedForward> feed_forward) {
  return {.mixer_residual = {"input_layernorm", pre_norm(c)},
          .mixer = is_full_attention ? Named<Mixer>{"self_attn", std::make_unique<GatedAttention>(c.attention)}
                                     : Named<Mixer>{"linear_attn", std::make_unique<GatedDeltaNet>(c.delta)},
          .feed_forward_residual = {"post_attention_layernorm", pre_norm(c)},
          .feed_forward = {"mlp", std::move(feed_forward)}};
}

DecoderParts hybrid_decoder(const HybridConfig& c,
                            const std::function<std::unique_ptr<FeedForward>(std::int64_t layer)>& feed_forward) {
  DecoderParts parts{.vocab_size = c.vocab_size,
                     .hidden_size = c.hidden_size,
                     .initializer_range = c.initializer_range,
                     .blocks = {},
                     .output = {"norm", pre_norm(c)},
                     .rotary = c.rotary,
                     .tie_word_embeddings = c.tie_word_embeddings};
  for (const bool full : c.is_full_attention) {
    parts.blocks.push_back(hybrid_block(c, full, feed_forward(static_cast<std::int64_t>(parts.blocks.size()))));
  }
  return parts;
}

std::unique_ptr<MultiTokenPrediction> hybrid_mtp(const HybridConfig& c, std::unique_ptr<FeedForward> feed_forward) {
  return std::make_unique<MultiTokenPrediction>(MultiTokenPredictionParts{
      .input = std::make_unique<JoinedInput>(c.hidden_size, c.rms_norm_eps, c.initializer_range),
      .block = hybrid_block(c, /*is_full_attention=*/true, std::move(feed_forward)),
      .output = {"norm", pre_norm(c)}});
}

WeightRules hybrid_weight_rules(const HybridConfig& c) {
  // The gates of the delta net, of experts and of the shared expert are as sensitive as they are small.
  WeightRules rules{.fp8 = {"*.self_attn.*_proj.weight", "*.linear_attn.in_proj_qkv*.weight",
                            "*.linear_attn.in_proj_z.weight", "*.linear_attn.out_proj.weight", "*.mlp.*_proj.weight"},
                    .prefixes = {{"model.language_model.", "model."}},
                    .aside = {{"model.visual.*", "vision tower"}, {"mtp.*", "multi-token prediction head"}}};
  if (c.tie_word_embeddings)
    rules.aside.push_back({"lm_head.weight", "head, tied to the embedding", /*exported=*/false});
  return rules;
}

std::vector<WeightRules::Pieces> expert_pieces(bool fresh) {
  return {{.parameter = "mlp.experts.gate_up_proj",
           .pieces = {"mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"},
           .stacked = true,
           .fresh = fresh},
          {.parameter = "mlp.experts.down_proj",
           .pieces = {"mlp.experts.{}.down_proj.weight"},
           .stacked = true,
           .fresh = fresh}};
}

}  // namespace sluice
