// SPDX-License-Identifier: Apache-2.0
// What the commands that train share.
#pragma once

#include <optional>

#include "sluice/cli/model_loading.h"
#include "sluice/train/setup.h"

namespace sluice {

// Gives the model the adapters that `lora` asks for: new ones, or those of its folder; a rank of a mesh its pieces.
TrainedAdapters adapt(const LoraOptions& lora, LoadedModel& loaded, std::uint64_t seed,
                      const Mesh& mesh = one_process());

// Writes RUN/export anew: the adapters, where there are some, or the model. All ranks of the mesh call it.
void export_run(const std::filesystem::path& run, const LoadedModel& loaded,
                const std::optional<TrainedAdapters>& adapters, MtpTraining mtp, const Mesh& mesh = one_process());

}  // namespace sluice
