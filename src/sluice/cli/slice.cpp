// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/slice.h"

#include <algorithm>

#include "sluice/checkpoint/export.h"
#include "sluice/checkpoint/load.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"

namespace sluice {
namespace {

// The same model with its first `layers` layers. `where` names config.json in messages.
nlohmann::ordered_json sliced_config(const std::filesystem::path& path, std::int64_t layers) {
  auto config = nlohmann::ordered_json::parse(read_file(path, kMaxConfigBytes));
  auto& text = config.contains("text_config") ? config["text_config"] : config;
  const auto all = text.value("num_hidden_layers", nlohmann::ordered_json());
  if (!all.is_number_integer() || all.get<std::int64_t>() < layers) {
    fail_usage("{}: num_hidden_layers is {}; {} layers cannot be kept of them", path.string(), all.dump(), layers);
  }
  text["num_hidden_layers"] = layers;
  if (text.contains("layer_types") && text["layer_types"].is_array()) {
    auto& types = text["layer_types"];
    types.erase(types.begin() + std::min<std::int64_t>(layers, static_cast<std::int64_t>(types.size())), types.end());
  }
  return config;
}

}  // namespace

ExitCode run_slice(const SliceOptions& options, const Invocation& invocation) {
  const ModelFolder source(options.folder);
  const auto path = source.path() / kConfigFile;
  const auto config = sliced_config(path, options.layers);
  auto model = build_model(nlohmann::json(config), path.string());
  const auto all = text_config(source.config()).at("num_hidden_layers").get<std::int64_t>();
  for (auto layer = options.layers; layer < all; ++layer) {
    for (const auto* prefix : {"model.layers", "model.language_model.layers"}) {
      model.weights.aside.push_back({fmt::format("{}.{}.*", prefix, layer), "layers cut off", /*exported=*/false});
    }
  }
  const auto parameters = model.parameters();
  const auto map = map_folder(source, parameters, model.weights);
  if (invocation.dry_run) return ExitCode::kDone;
  load_parameters(source, parameters, model.weights, lossless_dtype(map, parameters));
  export_model(
      options.out, parameters, source, model.weights,
      {.max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9), .config = config.dump(2) + "\n"});
  log_info("kept {} of {} layers: {}", options.layers, all, options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
