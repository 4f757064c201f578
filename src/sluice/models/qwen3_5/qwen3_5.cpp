// SPDX-License-Identifier: Apache-2.0
// Qwen3.5 dense, and Qwen3.6 and 3.8 dense, which share its model_type: gated delta net and gated attention layers in a
// fixed pattern, a SwiGLU in each. Architecture: docs/models.md.
#include <algorithm>

#include "sluice/core/error.h"
#include "sluice/layers/gated_attention.h"
#include "sluice/layers/gated_delta_net.h"
#include "sluice/models/config_reader.h"
#include "sluice/models/family.h"
#include "sluice/models/qwen3_5/presets.h"

namespace sluice {
namespace {

constexpr std::int64_t kMost = 4096;  // layers, heads, and dims of a head; published models have at most 256 of each

struct Qwen35Config {
  std::int64_t vocab_size, hidden_size, intermediate_size;
  double rms_norm_eps, initializer_range;
  std::vector<bool> is_full_attention;  // of each layer
  GatedAttentionSizes attention;
  GatedDeltaNetSizes delta;
  RotaryParts rotary;
  bool tie_word_embeddings;
};

std::vector<bool> read_layer_types(const ConfigReader& text) {
  const auto layers = text.size("num_hidden_layers", 32, kMost);
  const auto interval = text.size("full_attention_interval", 4);
  const auto types = text.strings("layer_types");
  if (!types.empty() && static_cast<std::int64_t>(types.size()) != layers) {
    text.fail_at("layer_types", fmt::format("{} entries, one for each of num_hidden_layers", layers));
  }
  std::vector<bool> full;
  for (std::int64_t i = 0; i < layers; ++i) {
    if (types.empty()) {
      full.push_back((i + 1) % interval == 0);
    } else if (types[i] == "full_attention" || types[i] == "linear_attention") {
      full.push_back(types[i] == "full_attention");
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

Qwen35Config read_config(const nlohmann::json& config, const std::string& where) {
  const ConfigReader top(config, where);
  const auto text = top.has("text_config") ? top.object("text_config") : top;
  text.require("hidden_act", {"silu"});
  text.require("attention_bias", {false});
  text.require("attention_dropout", {0.0, 0});
  text.require("attn_output_gate", {true});
  text.require("output_gate_type", {"swish", "silu"});
  text.require("mamba_ssm_dtype", {"float32"});
  Qwen35Config c{};
  c.vocab_size = text.size("vocab_size", 248320, 1 << 24);
  c.hidden_size = text.size("hidden_size", kMost);
  c.intermediate_size = text.size("intermediate_size", 12288);
  c.rms_norm_eps = text.number("rms_norm_eps", 1e-6);
  c.initializer_range = text.number("initializer_range", 0.02);
  if (c.rms_norm_eps <= 0) text.fail_at("rms_norm_eps", "a number above 0");
  if (c.initializer_range < 0) text.fail_at("initializer_range", "a number of at least 0");
  c.is_full_attention = read_layer_types(text);
  c.attention = {.hidden_size = c.hidden_size,
                 .num_attention_heads = text.size("num_attention_heads", 16, kMost),
                 .num_key_value_heads = text.size("num_key_value_heads", 4, kMost),
                 .head_dim = text.size("head_dim", 256, kMost),
                 .rms_norm_eps = c.rms_norm_eps,
                 .initializer_range = c.initializer_range};
  c.delta = {.hidden_size = c.hidden_size,
             .num_key_heads = text.size("linear_num_key_heads", 16, kMost),
             .num_value_heads = text.size("linear_num_value_heads", 32, kMost),
             .key_head_dim = text.size("linear_key_head_dim", 128, kMost),
             .value_head_dim = text.size("linear_value_head_dim", 128, kMost),
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

std::unique_ptr<ZeroCenteredRmsNorm> norm(const Qwen35Config& c) {
  return std::make_unique<ZeroCenteredRmsNorm>(c.hidden_size, c.rms_norm_eps);
}

BlockParts block(const Qwen35Config& c, bool is_full_attention) {
  return {.mixer_norm = {"input_layernorm", norm(c)},
          .mixer = is_full_attention ? Named<Mixer>{"self_attn", std::make_unique<GatedAttention>(c.attention)}
                                     : Named<Mixer>{"linear_attn", std::make_unique<GatedDeltaNet>(c.delta)},
          .feed_forward_norm = {"post_attention_layernorm", norm(c)},
          .feed_forward = {"mlp", std::make_unique<SwiGlu>(c.hidden_size, c.intermediate_size, c.initializer_range)}};
}

WeightRules weight_rules(const Qwen35Config& c) {
  WeightRules rules{.prefixes = {{"model.language_model.", "model."}},
                    .aside = {{"model.visual.*", "vision tower"}, {"mtp.*", "multi-token prediction head"}},
                    .pieces = {}};
  if (c.tie_word_embeddings)
    rules.aside.push_back({"lm_head.weight", "head, tied to the embedding", /*exported=*/false});
  return rules;
}

Model build(const nlohmann::json& config, const std::string& where) {
  const auto c = read_config(config, where);
  DecoderParts parts{.vocab_size = c.vocab_size,
                     .hidden_size = c.hidden_size,
                     .initializer_range = c.initializer_range,
                     .blocks = {},
                     .final_norm = norm(c),
                     .rotary = c.rotary,
                     .tie_word_embeddings = c.tie_word_embeddings};
  for (const bool full : c.is_full_attention) parts.blocks.push_back(block(c, full));
  return {.decoder = std::make_unique<Decoder>(std::move(parts)), .weights = weight_rules(c)};
}

const RegisterFamily registered(
    {.name = "qwen3_5", .model_types = {"qwen3_5", "qwen3_5_text"}, .presets = qwen3_5_presets(), .build = build});

}  // namespace
}  // namespace sluice
