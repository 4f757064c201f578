// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/qwen3_5_moe/presets.h"

#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using nlohmann::json;

// What all published sizes share; theta, eos and vocabulary as published. One width is that of every expert, the shared
// one too.
json text_config(std::int64_t hidden_size, std::int64_t layers, std::int64_t heads, std::int64_t linear_value_heads,
                 std::int64_t experts, std::int64_t experts_per_token, std::int64_t expert_width) {
  return {{"model_type", "qwen3_5_moe_text"},
          {"architectures", {"Qwen3_5MoeForCausalLM"}},
          {"vocab_size", 248320},
          {"hidden_size", hidden_size},
          {"num_hidden_layers", layers},
          {"num_attention_heads", heads},
          {"num_key_value_heads", 2},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", linear_value_heads},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"full_attention_interval", 4},
          {"num_experts", experts},
          {"num_experts_per_tok", experts_per_token},
          {"moe_intermediate_size", expert_width},
          {"shared_expert_intermediate_size", expert_width},
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
          {"eos_token_id", 248044},
          {"dtype", "bfloat16"}};
}

// Three linear layers and one of softmax attention, 16 experts of which a token sees 4, over a vocabulary of 1,024.
json tiny() {
  auto config = text_config(128, 4, 4, 4, 16, 4, 64);
  config.update({{"vocab_size", 1024},
                 {"head_dim", 32},
                 {"linear_num_key_heads", 2},
                 {"linear_key_head_dim", 32},
                 {"linear_value_head_dim", 32},
                 {"max_position_embeddings", 4096},
                 {"rope_parameters",
                  {{"rope_type", "default"},
                   {"rope_theta", 10000},
                   {"partial_rotary_factor", 0.5},
                   {"mrope_interleaved", true},
                   {"mrope_section", {3, 3, 2}}}},
                 {"eos_token_id", 2},
                 {"dtype", "float32"}});
  return config;
}

}  // namespace

std::map<std::string, std::string> qwen3_5_moe_presets() {
  return {{"qwen3_5_moe-tiny", tiny().dump()},
          {"qwen3_5_moe-35b-a3b", text_config(2048, 40, 16, 32, 256, 8, 512).dump()},
          {"qwen3_5_moe-122b-a10b", text_config(3072, 48, 32, 64, 256, 8, 1024).dump()},
          {"qwen3_5_moe-397b-a17b", text_config(4096, 60, 32, 64, 512, 10, 1024).dump()}};
}

}  // namespace sluice
