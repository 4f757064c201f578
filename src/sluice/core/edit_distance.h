// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// Insertions, deletions, replacements and swaps of neighbours that turn one text into the other. Takes the product of
// their sizes in time and memory.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace sluice
