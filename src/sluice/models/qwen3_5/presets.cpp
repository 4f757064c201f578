// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/qwen3_5/presets.h"

#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using nlohmann::json;

// What all published sizes share; theta, eos and vocabulary as published.
json text_config(std::int64_t hidden_size, std::int64_t intermediate_size, std::int64_t layers, std::int64_t heads,
                 std::int64_t key_value_heads, std::int64_t linear_value_heads, bool tied) {
  return {{"model_type", "qwen3_5_text"},
          {"architectures", {"Qwen3_5ForCausalLM"}},
          {"vocab_size", 248320},
          {"hidden_size", hidden_size},
          {"intermediate_size", intermediate_size},
          {"num_hidden_layers", layers},
          {"num_attention_heads", heads},
          {"num_key_value_heads", key_value_heads},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", linear_value_heads},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"full_attention_interval", 4},
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
          {"tie_word_embeddings", tied},
          {"eos_token_id", 248044},
          {"dtype", "bfloat16"}};
}

// Three linear layers and one of softmax attention over a vocabulary of 1,024.
json tiny() {
  auto config = text_config(128, 384, 4, 4, 2, 4, true);
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

// About 100M parameters, for benchmarks on a CPU.
json small() {
  auto config = text_config(768, 2048, 12, 8, 2, 12, true);
  config.update({{"vocab_size", 32768},
                 {"head_dim", 96},
                 {"linear_num_key_heads", 6},
                 {"linear_key_head_dim", 64},
                 {"linear_value_head_dim", 64},
                 {"rope_parameters",
                  {{"rope_type", "default"},
                   {"rope_theta", 1e6},
                   {"partial_rotary_factor", 0.25},
                   {"mrope_interleaved", true},
                   {"mrope_section", {4, 4, 4}}}},
                 {"eos_token_id", 2}});
  return config;
}

}  // namespace

std::map<std::string, std::string> qwen3_5_presets() {
  return {{"qwen3_5-tiny", tiny().dump()},
          {"qwen3_5-100m", small().dump()},
          {"qwen3_5-0.8b", text_config(1024, 3584, 24, 8, 2, 16, true).dump()},
          {"qwen3_5-2b", text_config(2048, 6144, 24, 8, 2, 16, true).dump()},
          {"qwen3_5-4b", text_config(2560, 9216, 32, 16, 4, 32, true).dump()},
          {"qwen3_5-9b", text_config(4096, 12288, 32, 16, 4, 32, false).dump()},
          {"qwen3_5-27b", text_config(5120, 17408, 64, 24, 4, 48, false).dump()}};
}

}  // namespace sluice
