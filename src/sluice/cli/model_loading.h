// SPDX-License-Identifier: Apache-2.0
// From a model folder to a decoder that runs, for every command.
#pragma once

#include <filesystem>
#include <memory>

#include "sluice/checkpoint/load.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"
#include "sluice/train/options.h"

namespace sluice {

struct LoadedModel {
  std::unique_ptr<ModelFolder> folder;
  Model model;
};

at::ScalarType scalar_type_of(Precision precision);

// Data error if the folder is damaged or not of a known family.
LoadedModel load_model(const std::filesystem::path& path, at::ScalarType dtype);

}  // namespace sluice
