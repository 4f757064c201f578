// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/qwen3_8_flash_next/presets.h"

#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using nlohmann::json;

// Qwen3.8-Flash-Next as published: 125B parameters, and a table of 51B beside them.
json published() {
  return {{"model_type", "qwen4_exp_text"},
          {"architectures", {"Qwen4ExpForCausalLM"}},
          {"vocab_size", 248320},
          {"hidden_size", 2560},
          {"num_hidden_layers", 48},
          {"full_attention_interval", 4},
          {"num_attention_heads", 24},
          {"num_key_value_heads", 2},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", 48},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"output_gate_type", "sigmoid"},
          {"indexer_n_heads", 4},
          {"indexer_kv_heads", 1},
          {"indexer_head_dim", 128},
          {"indexer_budget", 2048},
          {"indexer_compress_ratio", 4},
          {"hc_count", 4},
          {"hc_lowrank", 320},
          {"ple_layer_ids", {2}},
          {"ple_embed_dim", 2560},
          {"ple_conv_kernel_size", 4},
          {"ngram_size", 3},
          {"heads_per_ngram", 8},
          {"ngram_vocab_size_base", 20000000},
          {"make_ngram_vocab_size_divisible_by", 128},
          {"split_ngram_parts", 128},
          {"num_experts", 512},
          {"num_experts_per_tok", 10},
          {"norm_topk_prob", true},
          {"moe_intermediate_size", 640},
          {"shared_expert_intermediate_size", 640},
          {"output_router_logits", false},
          {"router_aux_loss_coef", 0.001},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-6},
          {"initializer_range", 0.02},
          {"max_position_embeddings", 262144},
          {"rope_parameters",
           {{"rope_type", "default"},
            {"rope_theta", 1e7},
            {"partial_rotary_factor", 0.25},
            {"mrope_interleaved", true},
            {"mrope_section", {11, 11, 10}}}},
          {"tie_word_embeddings", false},
          {"bos_token_id", 248044},
          {"eos_token_id", 248044},
          {"dtype", "bfloat16"}};
}

// Every part of it: three linear layers, one of sparse attention, which chooses 16 blocks past 64 tokens, two streams,
// 16 experts of which a token sees 4, an n-gram table of 8,192 rows before the second layer, over a vocabulary of
// 1,024.
json tiny() {
  auto config = published();
  config.update({{"vocab_size", 1024},
                 {"hidden_size", 128},
                 {"num_hidden_layers", 4},
                 {"num_attention_heads", 4},
                 {"head_dim", 32},
                 {"linear_num_key_heads", 2},
                 {"linear_num_value_heads", 4},
                 {"linear_key_head_dim", 32},
                 {"linear_value_head_dim", 32},
                 {"indexer_n_heads", 2},
                 {"indexer_head_dim", 32},
                 {"indexer_budget", 64},
                 {"hc_count", 2},
                 {"hc_lowrank", 32},
                 {"ple_embed_dim", 128},
                 {"heads_per_ngram", 4},
                 {"ngram_vocab_size_base", 990},
                 {"split_ngram_parts", 4},
                 {"num_experts", 16},
                 {"num_experts_per_tok", 4},
                 {"moe_intermediate_size", 64},
                 {"shared_expert_intermediate_size", 64},
                 {"max_position_embeddings", 4096},
                 {"rope_parameters",
                  {{"rope_type", "default"},
                   {"rope_theta", 10000},
                   {"partial_rotary_factor", 0.5},
                   {"mrope_interleaved", true},
                   {"mrope_section", {3, 3, 2}}}},
                 {"bos_token_id", 2},
                 {"eos_token_id", 2},
                 {"dtype", "float32"}});
  return config;
}

}  // namespace

std::map<std::string, std::string> qwen3_8_flash_next_presets() {
  return {{"qwen3_8_flash_next-tiny", tiny().dump()}, {"qwen3_8_flash_next-125b-a6b", published().dump()}};
}

}  // namespace sluice
