// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/qwen3_next/presets.h"

#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using nlohmann::json;

// Qwen3-Next-80B-A3B as published.
json published() {
  return {{"model_type", "qwen3_next"},
          {"architectures", {"Qwen3NextForCausalLM"}},
          {"vocab_size", 151936},
          {"hidden_size", 2048},
          {"intermediate_size", 5120},
          {"num_hidden_layers", 48},
          {"num_attention_heads", 16},
          {"num_key_value_heads", 2},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", 32},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"full_attention_interval", 4},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", json::array()},
          {"num_experts", 512},
          {"num_experts_per_tok", 10},
          {"moe_intermediate_size", 512},
          {"shared_expert_intermediate_size", 512},
          {"norm_topk_prob", true},
          {"output_router_logits", false},
          {"router_aux_loss_coef", 0.001},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-6},
          {"initializer_range", 0.02},
          {"max_position_embeddings", 262144},
          {"rope_theta", 10000000},
          {"partial_rotary_factor", 0.25},
          {"tie_word_embeddings", false},
          {"bos_token_id", 151643},
          {"eos_token_id", 151645},
          {"dtype", "bfloat16"}};
}

json coder() {
  auto config = published();
  config["rope_theta"] = 5000000;
  return config;
}

// Three linear layers and one of softmax attention, 16 experts of which a token sees 4, over a vocabulary of 1,024.
json tiny() {
  auto config = published();
  config.update({{"vocab_size", 1024},
                 {"hidden_size", 128},
                 {"intermediate_size", 384},
                 {"num_hidden_layers", 4},
                 {"num_attention_heads", 4},
                 {"head_dim", 32},
                 {"linear_num_key_heads", 2},
                 {"linear_num_value_heads", 4},
                 {"linear_key_head_dim", 32},
                 {"linear_value_head_dim", 32},
                 {"num_experts", 16},
                 {"num_experts_per_tok", 4},
                 {"moe_intermediate_size", 64},
                 {"shared_expert_intermediate_size", 64},
                 {"max_position_embeddings", 4096},
                 {"rope_theta", 10000},
                 {"partial_rotary_factor", 0.5},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", 2},
                 {"dtype", "float32"}});
  return config;
}

}  // namespace

std::map<std::string, std::string> qwen3_next_presets() {
  return {{"qwen3_next-tiny", tiny().dump()},
          {"qwen3_next-80b-a3b", published().dump()},
          {"qwen3_coder_next-80b-a3b", coder().dump()}};
}

}  // namespace sluice
