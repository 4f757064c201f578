// SPDX-License-Identifier: Apache-2.0
// Qwen3.5 dense, and Qwen3.6 and 3.8 dense, which share its model_type: gated delta net and gated attention layers in a
// fixed pattern, a SwiGLU in each. Architecture: docs/models.md.
#include "sluice/models/delta_hybrid.h"
#include "sluice/models/family.h"
#include "sluice/models/qwen3_5/presets.h"

namespace sluice {
namespace {

Model build(const nlohmann::json& config, const std::string& where, const BuildOptions& options) {
  const ConfigReader top(config, where);
  const auto text = text_reader(top);
  text.require("output_gate_type", {"swish", "silu"});
  const auto c = read_hybrid_config(
      top, {.vocab_size = 248320, .hidden_size = 4096, .num_hidden_layers = 32, .num_key_value_heads = 4});
  const auto intermediate_size = text.size("intermediate_size", 12288);
  const auto feed_forward = [&](std::int64_t) {
    return std::make_unique<SwiGlu>(c.hidden_size, intermediate_size, c.initializer_range);
  };
  return {.decoder = std::make_unique<Decoder>(hybrid_decoder(c, feed_forward)),
          .weights = hybrid_weight_rules(c),
          .mtp = options.mtp ? hybrid_mtp(c, feed_forward(0)) : nullptr};
}

const RegisterFamily registered(
    {.name = "qwen3_5", .model_types = {"qwen3_5", "qwen3_5_text"}, .presets = qwen3_5_presets(), .build = build});

}  // namespace
}  // namespace sluice
