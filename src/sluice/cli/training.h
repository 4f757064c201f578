// SPDX-License-Identifier: Apache-2.0
// What the commands that train share.
#pragma once

#include <optional>

#include "sluice/cli/model_loading.h"
#include "sluice/train/setup.h"

namespace sluice {

// Gives the model the adapters that `lora` asks for: new ones, or those of its folder.
TrainedAdapters adapt(const LoraOptions& lora, LoadedModel& loaded, std::uint64_t seed);

// Writes RUN/export anew: the adapters, where there are some, or the model.
void export_run(const std::filesystem::path& run, const LoadedModel& loaded,
                const std::optional<TrainedAdapters>& adapters, MtpTraining mtp);

}  // namespace sluice
