// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sluice/core/error.h"

namespace sluice {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// What the first byte of a character promises (Unicode, table 3-7). Only the second byte's range ever differs
// from 80..BF: that is how long forms, surrogates and numbers above U+10FFFF are kept out.
struct LeadByte {
  std::size_t length;  // 0: no character begins with this byte
  std::uint8_t second_low, second_high;
  std::uint8_t bits;  // the payload of the first byte
};

LeadByte lead_byte(std::uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0, byte};
  if (byte < 0xC2 || byte > 0xF4) return {0, 0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF, static_cast<std::uint8_t>(byte & 0x1F)};
  const std::uint8_t low = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  const std::uint8_t high = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  if (byte < 0xF0) return {3, low, high, static_cast<std::uint8_t>(byte & 0x0F)};
  return {4, low, high, static_cast<std::uint8_t>(byte & 0x07)};
}

// The length of the ASCII at `position`, in steps of 8 bytes.
std::size_t ascii_words(std::string_view text, std::size_t position) {
  const std::size_t begin = position;
  for (std::uint64_t word; position + sizeof(word) <= text.size(); position += sizeof(word)) {
    std::memcpy(&word, text.data() + position, sizeof(word));
    if ((word & 0x8080808080808080u) != 0) break;
  }
  return position - begin;
}

}  // namespace

Utf8Step utf8_step(std::string_view text, std::size_t position) {
  const auto lead = lead_byte(static_cast<std::uint8_t>(text[position]));
  if (lead.length == 0) return {Utf8Kind::kBroken, 0, 1};
  char32_t code_point = lead.bits;
  for (std::size_t i = 1; i < lead.length; ++i) {
    if (position + i == text.size()) return {Utf8Kind::kUnfinished, 0, i};
    const auto byte = static_cast<std::uint8_t>(text[position + i]);
    const std::uint8_t low = i == 1 ? lead.second_low : 0x80;
    const std::uint8_t high = i == 1 ? lead.second_high : 0xBF;
    if (byte < low || byte > high) return {Utf8Kind::kBroken, 0, i};
    code_point = code_point << 6 | (byte & 0x3Fu);
  }
  return {Utf8Kind::kCharacter, code_point, lead.length};
}

std::optional<std::size_t> find_broken_utf8(std::string_view text) {
  for (std::size_t position = 0; position < text.size();) {
    if (const auto ascii = ascii_words(text, position); ascii > 0) {
      position += ascii;
      continue;
    }
    const auto step = utf8_step(text, position);
    if (step.kind != Utf8Kind::kCharacter) return position;
    position += step.length;
  }
  return std::nullopt;
}

void check_utf8(std::string_view text, std::string_view what) {
  const auto position = find_broken_utf8(text);
  if (!position) return;
  const auto byte = static_cast<std::uint8_t>(text[*position]);
  const bool unfinished = utf8_step(text, *position).kind == Utf8Kind::kUnfinished;
  fail_data("{}: not UTF-8 at byte {} (0x{:02X}{}); convert the text to UTF-8 first", what, *position, byte,
            unfinished ? " begins a character that the text does not finish" : "");
}

std::string replace_broken_utf8(std::string_view text) {
  std::string whole;
  whole.reserve(text.size());
  for (std::size_t position = 0; position < text.size();) {
    const auto step = utf8_step(text, position);
    whole += step.kind == Utf8Kind::kCharacter ? text.substr(position, step.length) : kReplacement;
    position += step.length;
  }
  return whole;
}

std::size_t unfinished_utf8_bytes(std::string_view text) {
  const std::size_t most = std::min<std::size_t>(text.size(), 3);
  for (std::size_t count = 1; count <= most; ++count) {
    const auto step = utf8_step(text, text.size() - count);
    if (step.kind == Utf8Kind::kUnfinished && step.length == count) return count;
  }
  return 0;
}

void append_utf8(std::string& text, char32_t code_point) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (code_point >> shift & 0x3F)); };
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    text += static_cast<char>(0xC0 | code_point >> 6);
    tail(0);
  } else if (code_point < 0x10000) {
    text += static_cast<char>(0xE0 | code_point >> 12);
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0 | code_point >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace sluice
