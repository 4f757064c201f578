// SPDX-License-Identifier: Apache-2.0
// For tests of the folders above.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "sluice/models/family.h"

namespace sluice {

// The tiny presets of all families.
inline std::map<std::string, nlohmann::json> tiny_configs() {
  std::map<std::string, nlohmann::json> configs;
  for (const auto& family : families()) {
    for (const auto& [name, config] : family.presets) {
      if (name.ends_with("-tiny")) configs.emplace(name, nlohmann::json::parse(config));
    }
  }
  return configs;
}

}  // namespace sluice
