// SPDX-License-Identifier: Apache-2.0
// A configuration without weights: one that comes with the program, or a config.json.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

struct ModelSource {
  nlohmann::ordered_json config;
  std::string where;  // for messages
};

// "qwen3_5-0.8b, qwen3_5-27b, ..."
std::string preset_names();

// Usage error, in the name of `command`, unless exactly one of both is given and the preset exists.
ModelSource read_model_source(std::string_view command, const std::string& preset,
                              const std::optional<std::filesystem::path>& config);

}  // namespace sluice
