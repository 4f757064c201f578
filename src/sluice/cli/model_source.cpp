// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/model_source.h"

#include "sluice/core/error.h"
#include "sluice/formats/json.h"
#include "sluice/models/family.h"

namespace sluice {

std::string preset_names() {
  std::string names;
  for (const auto& family : families()) {
    for (const auto& [name, config] : family.presets) names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

ModelSource read_model_source(std::string_view command, const std::string& preset,
                              const std::optional<std::filesystem::path>& config) {
  if (preset.empty() == !config) fail_usage("{}: give either --preset or --config", command);
  if (config) return {nlohmann::ordered_json(read_json_object(*config, 64 << 20)), config->string()};
  for (const auto& family : families()) {
    if (const auto found = family.presets.find(preset); found != family.presets.end()) {
      return {nlohmann::ordered_json::parse(found->second), "preset " + preset};
    }
  }
  fail_usage("{}: no preset is called {}; there are {}", command, preset, preset_names());
}

}  // namespace sluice
