// SPDX-License-Identifier: Apache-2.0
// Configurations that `sluice init --preset` knows, by name.
#pragma once

#include <map>
#include <string>

namespace sluice {

std::map<std::string, std::string> qwen3_8_flash_next_presets();

}  // namespace sluice
