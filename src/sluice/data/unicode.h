// SPDX-License-Identifier: Apache-2.0
// The Unicode properties and the normal form that tokenizers ask for. Arguments are valid UTF-8 (utf8.h).
#pragma once

#include <string>
#include <string_view>

namespace sluice {

// Normalization form C (Unicode annex 15). Code points that joined Unicode after the reference tokenizer's tables were
// made (kNotNormalized of unicode_tables.h) stay as they are and join with nothing, so that ids agree with it.
std::string to_nfc(std::string_view text);

bool is_white_space(char32_t code_point);     // property White_Space: `\s`
bool is_word_character(char32_t code_point);  // `\w` of Unicode annex 18: letters, marks, digits, connectors, joiners

}  // namespace sluice
