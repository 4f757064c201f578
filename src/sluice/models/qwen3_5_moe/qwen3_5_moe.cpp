// SPDX-License-Identifier: Apache-2.0
// The mixture-of-experts models of Qwen3.5 and 3.6: Qwen3.5 with a sparse block in every layer. Architecture:
// docs/models.md.
#include "sluice/models/delta_hybrid.h"
#include "sluice/models/family.h"
#include "sluice/models/qwen3_5_moe/presets.h"

namespace sluice {
namespace {

Model build(const nlohmann::json& config, const std::string& where, const BuildOptions& options) {
  const ConfigReader top(config, where);
  const auto text = text_reader(top);
  text.require("output_gate_type", {"swish", "silu"});
  const auto c = read_hybrid_config(
      top, {.vocab_size = 248320, .hidden_size = 2048, .num_hidden_layers = 40, .num_key_value_heads = 2});
  text.require("norm_topk_prob", {true});
  const auto moe = read_moe_sizes(text, c, 256, 8, /*norm_topk_prob=*/true);
  auto rules = hybrid_weight_rules(c);
  rules.pieces = expert_pieces(/*fresh=*/false);
  const auto feed_forward = [&](std::int64_t) { return std::make_unique<SparseMoe>(moe); };
  return {.decoder = std::make_unique<Decoder>(hybrid_decoder(c, feed_forward)),
          .weights = std::move(rules),
          .router_aux_loss_coef = read_router_aux_loss_coef(text),
          .mtp = options.mtp ? hybrid_mtp(c, feed_forward(0)) : nullptr};
}

const RegisterFamily registered({.name = "qwen3_5_moe",
                                 .model_types = {"qwen3_5_moe", "qwen3_5_moe_text"},
                                 .presets = qwen3_5_moe_presets(),
                                 .build = build});

}  // namespace
}  // namespace sluice
