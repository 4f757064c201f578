// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace sluice {

// True if `name` fits `pattern`, where `*` stands for any characters.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace sluice
