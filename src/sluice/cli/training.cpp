// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/training.h"

#include "sluice/checkpoint/adapter.h"
#include "sluice/checkpoint/export.h"
#include "sluice/checkpoint/whole_values.h"
#include "sluice/core/log.h"

namespace sluice {

TrainedAdapters adapt(const LoraOptions& lora, LoadedModel& loaded, std::uint64_t seed, const Mesh& mesh) {
  const auto parameters = loaded.model.parameters();
  LoraSettings settings{.alpha = lora.alpha, .targets = lora.targets};
  if (lora.adapter) {
    settings = load_adapter(*lora.adapter, parameters, loaded.model.weights, loaded.dtype);
  } else {
    settings.rank = *lora.rank;
    add_lora(parameters, settings, loaded.dtype, seed);
  }
  for (auto* parameter : lora_parameters(parameters)) {
    parameter->value = take_piece(parameter->value, *parameter, place_of(mesh)).contiguous();
  }
  settings.dropout = lora.dropout;
  for (auto* parameter : lora_parameters(parameters)) parameter->value = parameter->value.to(loaded.device.device);
  return {settings, share_dropout(parameters, lora.dropout, seed, place_of(mesh))};
}

void export_run(const std::filesystem::path& run, const LoadedModel& loaded,
                const std::optional<TrainedAdapters>& adapters, MtpTraining mtp, const Mesh& mesh) {
  const auto folder = run / kExportFolder;
  const bool writes = mesh.world().rank() == 0;
  if (writes) std::filesystem::remove_all(folder);  // of an earlier end of the same run
  const auto& model = loaded.model;
  if (adapters) {
    WholeValues whole(mesh);
    for (auto* parameter : lora_parameters(model.parameters())) parameter->value = whole.of(*parameter);
    if (writes) export_adapter(folder, model.parameters(), adapters->settings, *loaded.folder, model.weights);
  } else {
    export_model(folder, trained_parameters(model, mtp), *loaded.folder, export_rules(model, mtp), {}, mesh);
  }
  log_info("exported to {}", folder.string());
}

}  // namespace sluice
