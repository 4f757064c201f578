// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/model_loading.h"

namespace sluice {

at::ScalarType scalar_type_of(Precision precision) { return precision == Precision::kFloat32 ? kFloat : kBFloat16; }

LoadedModel load_model(const std::filesystem::path& path, at::ScalarType dtype) {
  LoadedModel loaded{.folder = std::make_unique<ModelFolder>(path), .model = {}};
  const auto where = (path / kConfigFile).string();
  loaded.model = build_model(loaded.folder->config(), where);
  load_parameters(*loaded.folder, loaded.model.decoder->parameters(), loaded.model.weights, dtype);
  return loaded;
}

}  // namespace sluice
