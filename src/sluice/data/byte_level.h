// SPDX-License-Identifier: Apache-2.0
// The byte-level alphabet of GPT-2 and its descendants: one printable character for each byte, in which vocabularies
// are written. Printable Latin-1 bytes stand for themselves; the other 68 are U+0100 onwards ("Ġ" is the space).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

char32_t byte_level_character(std::uint8_t byte);

// The bytes that a token of the vocabulary stands for; nothing if it holds a character outside the alphabet.
std::optional<std::string> byte_level_bytes(std::string_view token);

}  // namespace sluice
