// SPDX-License-Identifier: Apache-2.0
// What the Qwen families of gated-delta hybrids share: the keys of their config.json, the parts that the keys describe,
// and how checkpoints name them. A family's file says what is its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sluice/formats/weight_map.h"
#include "sluice/layers/experts.h"
#include "sluice/layers/gated_attention.h"
#include "sluice/layers/gated_delta_net.h"
#include "sluice/models/config_reader.h"
#include "sluice/models/decoder.h"
#include "sluice/models/multi_token_prediction.h"

namespace sluice {

inline constexpr std::int64_t kMostParts = 4096;  // layers, heads, dims of a head; published models have at most 256

// Values of keys that config.json leaves out, where transformers' classes differ.
struct HybridDefaults {
  std::int64_t vocab_size, hidden_size, num_hidden_layers, num_key_value_heads;
  std::string attention_layer_type = "full_attention";  // what layer_types may call attention beside that
};

struct HybridConfig {
  std::int64_t vocab_size, hidden_size;
  double rms_norm_eps, initializer_range;
  std::vector<bool> is_full_attention;  // of each layer
  GatedAttentionSizes attention;
  GatedDeltaNetSizes delta;
  RotaryParts rotary;
  bool tie_word_embeddings;
};

// The language model's part of a config.json: text_config of a multimodal one.
ConfigReader text_reader(const ConfigReader& top);

// Data error for a value that is not supported.
HybridConfig read_hybrid_config(const ConfigReader& top, const HybridDefaults& defaults);

// The keys of the mixture of experts. `num_experts` and `num_experts_per_tok` are the class's defaults.
SparseMoeSizes read_moe_sizes(const ConfigReader& text, const HybridConfig& c, std::int64_t num_experts,
                              std::int64_t num_experts_per_tok, bool norm_topk_prob);

// The weight of the load-balancing loss in training: router_aux_loss_coef where output_router_logits asks for it.
double read_router_aux_loss_coef(const ConfigReader& text);

// A block around either mixer and this feed-forward.
BlockParts hybrid_block(const HybridConfig& c, bool is_full_attention, std::unique_ptr<FeedForward> feed_forward);

// The whole decoder, with the feed-forward that each layer gets.
DecoderParts hybrid_decoder(const HybridConfig& c,
                            const std::function<std::unique_ptr<FeedForward>(std::int64_t layer)>& feed_forward);

// The multi-token prediction block: one layer of softmax attention with this feed-forward.
std::unique_ptr<MultiTokenPrediction> hybrid_mtp(const HybridConfig& c, std::unique_ptr<FeedForward> feed_forward);

// Both prefixes; the MTP block aside; a head that repeats a tied embedding left out.
WeightRules hybrid_weight_rules(const HybridConfig& c);

// Routed experts one by one on disk instead of fused; `fresh`: a new model is written so.
std::vector<WeightRules::Pieces> expert_pieces(bool fresh);

}  // namespace sluice
