// SPDX-License-Identifier: Apache-2.0
// Qwen3.8-Flash-Next (model_type qwen4_exp): the gated-delta hybrid with hyper-connections instead of a plain residual,
// sparse attention, an n-gram embedding beside some layers, and a mixture of experts in all. Architecture:
// docs/models.md.
#include <fmt/format.h>

#include <algorithm>

#include "sluice/core/error.h"
#include "sluice/layers/hyper_connection.h"
#include "sluice/layers/per_layer_embedding.h"
#include "sluice/models/delta_hybrid.h"
#include "sluice/models/family.h"
#include "sluice/models/qwen3_8_flash_next/presets.h"

namespace sluice {
namespace {

struct FlashNextConfig {
  HybridConfig hybrid;
  SparseMoeSizes moe;
  HyperConnectionSizes connection;
  BlockIndexerSizes indexer;
  PerLayerEmbeddingSizes embedding;      // its hash's index is that of each layer
  std::vector<std::int64_t> ple_layers;  // rising, from 0
  std::int64_t split_ngram_parts;
};

BlockIndexerSizes read_indexer(const ConfigReader& text, const HybridConfig& c) {
  text.require("indexer_kv_heads", {1});
  const BlockIndexerSizes sizes{.hidden_size = c.hidden_size,
                                .num_heads = text.size("indexer_n_heads", {}, kMostParts),
                                .head_dim = text.size("indexer_head_dim", {}, kMostParts),
                                .block_size = text.size("indexer_compress_ratio", {}, kMostParts),
                                .budget = text.size("indexer_budget"),
                                .rotary_theta = c.rotary.theta,
                                .rotary_dim = c.rotary.dim,
                                .rms_norm_eps = c.rms_norm_eps,
                                .initializer_range = c.initializer_range};
  if (sizes.budget % sizes.block_size != 0) {
    text.fail_at("indexer_budget", fmt::format("a multiple of indexer_compress_ratio = {}", sizes.block_size));
  }
  if (sizes.rotary_dim > sizes.head_dim) {
    text.fail_at("indexer_head_dim", fmt::format("at least the {} dims that turn with the position", sizes.rotary_dim));
  }
  return sizes;
}

std::vector<std::int64_t> read_ple_layers(const ConfigReader& text, const HybridConfig& c) {
  auto layers = text.integers("ple_layer_ids");  // from 1
  std::ranges::sort(layers);
  layers.erase(std::ranges::unique(layers).begin(), layers.end());
  constexpr std::size_t kMostTables = 16;
  if (layers.size() > kMostTables) text.fail_at("ple_layer_ids", fmt::format("at most {} layers", kMostTables));
  const auto count = static_cast<std::int64_t>(c.is_full_attention.size());
  for (auto& layer : layers) {
    if (layer < 1 || layer > count || c.is_full_attention[layer - 1]) {
      text.fail_at("ple_layer_ids", fmt::format("layers of linear attention, counted from 1 to {}", count));
    }
    --layer;
  }
  return layers;
}

PerLayerEmbeddingSizes read_embedding(const ConfigReader& text, const HybridConfig& c, std::int64_t streams) {
  // Published: primes from 20 million on, 16 heads. Far above, looking for primes would take minutes.
  constexpr std::int64_t kMostRows = 1 << 28, kMostHeads = 256;
  const auto ends = text.integers("eos_token_id");
  if (ends.empty() || ends[0] < 0 || ends[0] >= c.vocab_size) {
    text.fail_at("eos_token_id", "an id of the vocabulary, which ple_layer_ids needs");
  }
  const PerLayerEmbeddingSizes sizes{
      .hidden_size = c.hidden_size,
      .streams = streams,
      .embedding_size = text.size("ple_embed_dim", c.hidden_size),
      .conv_kernel_dim = text.size("ple_conv_kernel_size", 4, 64),
      .hash = {.vocab_size = c.vocab_size,
               .ngram_size = text.size("ngram_size", 3, 64),
               .heads_per_ngram = text.size("heads_per_ngram", 8, 64),
               .vocab_size_base = text.size("ngram_vocab_size_base", 20000000, kMostRows),
               .divisible_by = text.size("make_ngram_vocab_size_divisible_by", 128),
               .seed = text.size("seed", 1234, 1LL << 32),
               .index = 0,
               .eos_token_id = ends[0]},
      .rms_norm_eps = c.rms_norm_eps,
      .initializer_range = c.initializer_range};
  const auto heads = (sizes.hash.ngram_size - 1) * sizes.hash.heads_per_ngram;
  if (heads == 0 || heads > kMostHeads) {
    text.fail_at("heads_per_ngram", fmt::format("1 to {} heads for the orders from 2 to ngram_size", kMostHeads));
  }
  if (sizes.embedding_size % heads != 0) {
    text.fail_at("ple_embed_dim", fmt::format("a multiple of the {} n-gram heads", heads));
  }
  return sizes;
}

FlashNextConfig read_config(const ConfigReader& top, bool mtp) {
  const auto text = text_reader(top);
  text.require("output_gate_type", {"silu", "sigmoid"});
  FlashNextConfig c{};
  c.hybrid = read_hybrid_config(top, {.vocab_size = 248320,
                                      .hidden_size = 2048,
                                      .num_hidden_layers = 40,
                                      .num_key_value_heads = 2,
                                      .attention_layer_type = "indexed_attention"});
  if (text.is("output_gate_type", "sigmoid")) c.hybrid.delta.output_gate = GateActivation::kSigmoid;
  c.moe = read_moe_sizes(text, c.hybrid, 512, 10, text.flag("norm_topk_prob", true));
  c.connection = {.hidden_size = c.hybrid.hidden_size,
                  .streams = text.size("hc_count", 4, 64),
                  .rank = text.size("hc_lowrank", 320),
                  .rms_norm_eps = c.hybrid.rms_norm_eps,
                  .initializer_range = c.hybrid.initializer_range};
  if (c.connection.streams < 2) text.fail_at("hc_count", "at least 2");
  const auto& full = c.hybrid.is_full_attention;
  const bool mtp_rope = text.object("mtp").has("rope_theta");
  if (mtp_rope && text.object("mtp").number("rope_theta") != c.hybrid.rotary.theta) {
    text.object("mtp").fail_at("rope_theta", fmt::format("that of the model, {}", c.hybrid.rotary.theta));
  }
  if (mtp || std::ranges::find(full, true) != full.end()) c.indexer = read_indexer(text, c.hybrid);
  c.ple_layers = read_ple_layers(text, c.hybrid);
  if (!c.ple_layers.empty()) c.embedding = read_embedding(text, c.hybrid, c.connection.streams);
  c.split_ngram_parts = text.size("split_ngram_parts", 512);
  return c;
}

std::unique_ptr<HyperConnection> connection(const FlashNextConfig& c, HyperConnection::Role role) {
  return std::make_unique<HyperConnection>(c.connection, role);
}

BlockParts block(const FlashNextConfig& c, bool is_full_attention) {
  auto mixer = is_full_attention
                   ? Named<Mixer>{"self_attn", std::make_unique<GatedAttention>(
                                                   c.hybrid.attention, std::make_unique<BlockIndexer>(c.indexer))}
                   : Named<Mixer>{"linear_attn", std::make_unique<GatedDeltaNet>(c.hybrid.delta)};
  return {.mixer_residual = {"attn_hyper_connection", connection(c, HyperConnection::Role::kPart)},
          .mixer = std::move(mixer),
          .feed_forward_residual = {"mlp_hyper_connection", connection(c, HyperConnection::Role::kPart)},
          .feed_forward = {"mlp", std::make_unique<SparseMoe>(c.moe)}};
}

// Puts the n-gram embedding before its layers, and says how their tables lie on disk.
void add_embeddings(const FlashNextConfig& c, DecoderParts& parts, WeightRules& rules) {
  auto sizes = c.embedding;
  for (const auto layer : c.ple_layers) {
    auto part = std::make_unique<PerLayerEmbedding>(sizes);
    const auto rows = part->table_rows();
    const auto table = fmt::format("layers.{}.ple.ple_embedding.ngram_embedding.", layer);
    rules.pieces.push_back({.parameter = table + "weight",
                            .pieces = {table + "shard_{}.weight"},
                            .stacked = false,
                            .fresh = rows % c.split_ngram_parts == 0,
                            .fresh_count = c.split_ngram_parts});
    parts.blocks[layer].per_layer_embedding = Named<Mixer>{"ple", std::move(part)};
    ++sizes.hash.index;
  }
}

// One more layer of sparse attention between streams of its own.
std::unique_ptr<MultiTokenPrediction> multi_token_prediction(const FlashNextConfig& c) {
  return std::make_unique<MultiTokenPrediction>(MultiTokenPredictionParts{
      .input = std::make_unique<StreamsInput>(c.hybrid.hidden_size, c.connection.streams, c.hybrid.rms_norm_eps,
                                              c.hybrid.initializer_range),
      .block = block(c, /*is_full_attention=*/true),
      .output = {"hyper_connection_mixer", connection(c, HyperConnection::Role::kOutput)}});
}

Model build(const nlohmann::json& config, const std::string& where, const BuildOptions& options) {
  const ConfigReader top(config, where);
  const auto c = read_config(top, options.mtp);
  DecoderParts parts{.vocab_size = c.hybrid.vocab_size,
                     .hidden_size = c.hybrid.hidden_size,
                     .initializer_range = c.hybrid.initializer_range,
                     .blocks = {},
                     .output = {"hyper_connection_mixer", connection(c, HyperConnection::Role::kOutput)},
                     .rotary = c.hybrid.rotary,
                     .tie_word_embeddings = c.hybrid.tie_word_embeddings,
                     .streams = c.connection.streams};
  for (const bool full : c.hybrid.is_full_attention) parts.blocks.push_back(block(c, full));
  auto rules = hybrid_weight_rules(c.hybrid);
  rules.pieces = expert_pieces(/*fresh=*/false);
  rules.fp8 = {"*.mlp.experts.*_proj.weight"};
  add_embeddings(c, parts, rules);
  return {.decoder = std::make_unique<Decoder>(std::move(parts)),
          .weights = std::move(rules),
          .router_aux_loss_coef = read_router_aux_loss_coef(text_reader(top)),
          .mtp = options.mtp ? multi_token_prediction(c) : nullptr};
}

const RegisterFamily registered({.name = "qwen3_8_flash_next",
                                 .model_types = {"qwen4_exp", "qwen4_exp_text"},
                                 .presets = qwen3_8_flash_next_presets(),
                                 .build = build});

}  // namespace
}  // namespace sluice
