// SPDX-License-Identifier: Apache-2.0
// From a model folder to a decoder that runs, for every command.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "sluice/checkpoint/load.h"
#include "sluice/formats/model_folder.h"
#include "sluice/kernels/common/device.h"
#include "sluice/models/family.h"
#include "sluice/train/options.h"

namespace sluice {

struct LoadedModel {
  std::unique_ptr<ModelFolder> folder;
  Model model;
  ComputeDevice device;
  at::ScalarType dtype;  // of weights and activations
};

// Everything but the parameters' values. Data error if the folder is damaged or not of a known family; usage error if
// the device cannot be used (open_device), or runs no such model. `auto` takes the CPU there. Without a precision:
// bfloat16 on a GPU, float32 on the CPU. `gpu`: the number of the GPU, of several.
LoadedModel open_model(const std::filesystem::path& path, DeviceChoice device, std::optional<Precision> precision,
                       const BuildOptions& options = {}, std::int64_t gpu = 0);

// The values, on the device; of a rank of a mesh its pieces. `adapter`: a folder in PEFT's form, which the model is
// given.
void load_values(LoadedModel& loaded, const std::optional<std::filesystem::path>& adapter = std::nullopt,
                 const MeshPlace& place = {});

// Both.
LoadedModel load_model(const std::filesystem::path& path, DeviceChoice device, std::optional<Precision> precision,
                       const BuildOptions& options = {},
                       const std::optional<std::filesystem::path>& adapter = std::nullopt);

}  // namespace sluice
