// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/text.h"

#include <algorithm>

#include "sluice/data/utf8.h"

namespace sluice::jinja {

std::size_t code_point_size(char first_byte) {
  const auto byte = static_cast<unsigned char>(first_byte);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

std::vector<std::size_t> code_point_starts(std::string_view text) {
  std::vector<std::size_t> starts;
  for (std::size_t at = 0; at < text.size(); at += code_point_size(text[at])) starts.push_back(at);
  starts.push_back(text.size());
  return starts;
}

std::size_t count_code_points(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

char32_t code_point_at(std::string_view text, std::size_t byte) { return utf8_step(text, byte).code_point; }

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace sluice::jinja
