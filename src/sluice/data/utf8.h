// SPDX-License-Identifier: Apache-2.0
// UTF-8 as Unicode defines it: shortest form, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

enum class Utf8Kind {
  kCharacter,
  kBroken,
  kUnfinished,  // the text ends inside a character that is right so far
};

// What stands at one byte position of a text.
struct Utf8Step {
  Utf8Kind kind;
  char32_t code_point;  // of a kCharacter; 0 otherwise
  std::size_t length;   // bytes of the character, or of the longest start of a character that is there (at least 1)
};

// Requires position < text.size().
Utf8Step utf8_step(std::string_view text, std::size_t position);

// The byte position of the first part of `text` that is not UTF-8.
std::optional<std::size_t> find_broken_utf8(std::string_view text);

// Data error that names `what` and the byte position, if `text` is not UTF-8.
void check_utf8(std::string_view text, std::string_view what);

// Each broken or unfinished part becomes U+FFFD (Unicode's "maximal subpart" practice, as Rust and Python decode).
std::string replace_broken_utf8(std::string_view text);

// Number of bytes at the end of `text` that begin a character and do not finish it: 0 to 3.
std::size_t unfinished_utf8_bytes(std::string_view text);

void append_utf8(std::string& text, char32_t code_point);

}  // namespace sluice
