// SPDX-License-Identifier: Apache-2.0
// What every training run sets up from its options: the parameters that it trains, the model's or its adapters', the
// optimizer's settings, and how a checkpoint and an export speak of them.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "sluice/layers/lora.h"
#include "sluice/models/family.h"
#include "sluice/train/adamw.h"
#include "sluice/train/options.h"

namespace sluice {

// The parameters that a run trains: all of the model's that are not frozen and its adapters', or with train.mtp =
// "only" the multi-token prediction block's.
std::vector<Parameter*> trained_parameters(const Model& model, MtpTraining mtp);

// By which a run's export follows its source: what it did not train is copied.
WeightRules export_rules(const Model& model, MtpTraining mtp);

// The adapters that a run trains instead of the model.
struct TrainedAdapters {
  LoraSettings settings;
  std::shared_ptr<LoraDropout> dropout;
};

// What masters alone do not say of adapters: rank, alpha and dropout of all, and what multiplies each.
nlohmann::json describe_adapters(const Model& model, const LoraSettings& settings);

// Asks for gradients of these parameters; the query and key norms decay where optim.decay_qk_norm says so.
std::vector<Parameter*> prepare(std::vector<Parameter*> parameters, const OptimOptions& optim);

GradientSum::Kept gradients_kept(const ParallelOptions& parallel);
OffloadSettings offload_settings(Offload offload, const std::filesystem::path& run);
AdamWSettings adamw_settings(const OptimOptions& optim);
Schedule make_schedule(const OptimOptions& optim, std::int64_t total_steps);

// Whether something that is done every `interval` steps, 0: never, and at the `last`, is due after `step`.
bool due(std::int64_t step, std::int64_t interval, std::int64_t last);

}  // namespace sluice
