// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/setup.h"

#include <algorithm>
#include <cmath>

namespace sluice {

std::vector<Parameter*> trained_parameters(const Model& model, MtpTraining mtp) {
  return trained_parameters(mtp == MtpTraining::kOnly ? model.mtp->parameters() : model.parameters());
}

WeightRules export_rules(const Model& model, MtpTraining mtp) {
  auto rules = model.weights;
  const bool all = trained_parameters(model, mtp).size() == model.parameters().size();
  if (!all) rules.aside.push_back({"*", "not trained"});
  return rules;
}

nlohmann::json describe_adapters(const Model& model, const LoraSettings& settings) {
  auto scales = nlohmann::json::object();
  for (const auto* parameter : model.parameters()) {
    if (parameter->adapter) scales[module_name(*parameter)] = parameter->adapter->scale;
  }
  return {{"rank", settings.rank}, {"alpha", settings.alpha}, {"dropout", settings.dropout}, {"scales", scales}};
}

std::vector<Parameter*> prepare(std::vector<Parameter*> parameters, const OptimOptions& optim) {
  for (auto* parameter : parameters) {
    parameter->value.requires_grad_();
    const auto ends = [&](std::string_view suffix) { return parameter->name.ends_with(suffix); };
    if (optim.decay_qk_norm && (ends(".q_norm.weight") || ends(".k_norm.weight"))) parameter->decay = true;
  }
  return parameters;
}

GradientSum::Kept gradients_kept(const ParallelOptions& parallel) {
  return parallel.shard_gradients ? GradientSum::Kept::kOwned : GradientSum::Kept::kHeld;
}

OffloadSettings offload_settings(Offload offload, const std::filesystem::path& run) {
  return {.where = offload, .folder = run};
}

AdamWSettings adamw_settings(const OptimOptions& optim) {
  return {.beta1 = optim.beta1, .beta2 = optim.beta2, .eps = optim.eps, .weight_decay = optim.weight_decay};
}

Schedule make_schedule(const OptimOptions& optim, std::int64_t total_steps) {
  const auto part = [&](double ratio) {
    return static_cast<std::int64_t>(std::lround(ratio * static_cast<double>(total_steps)));
  };
  return {.shape = optim.schedule,
          .lr = optim.lr,
          .min_lr_ratio = optim.min_lr_ratio,
          .warmup_steps = std::min(total_steps, optim.warmup_steps.value_or(part(optim.warmup_ratio))),
          .decay_steps = part(optim.decay_ratio),
          .total_steps = total_steps};
}

bool due(std::int64_t step, std::int64_t interval, std::int64_t last) {
  return step == last || (interval > 0 && step % interval == 0);
}

}  // namespace sluice
