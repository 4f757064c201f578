// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/byte_level.h"

#include <array>

#include "sluice/data/utf8.h"

namespace sluice {
namespace {

constexpr std::array<char32_t, 256> make_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
    alphabet[byte] = printable ? byte : next++;
  }
  return alphabet;
}
constexpr auto kAlphabet = make_alphabet();

constexpr int kNoByte = -1;
constexpr std::array<int, 0x144> make_bytes() {
  std::array<int, 0x144> bytes{};
  for (int& byte : bytes) byte = kNoByte;
  for (int byte = 0; byte < 256; ++byte) bytes[kAlphabet[static_cast<std::size_t>(byte)]] = byte;
  return bytes;
}
constexpr auto kBytes = make_bytes();  // kBytes[kAlphabet[b]] == b

}  // namespace

char32_t byte_level_character(std::uint8_t byte) { return kAlphabet[byte]; }

std::optional<std::string> byte_level_bytes(std::string_view token) {
  std::string bytes;
  bytes.reserve(token.size());
  for (std::size_t position = 0; position < token.size();) {
    const auto step = utf8_step(token, position);
    if (step.kind != Utf8Kind::kCharacter || step.code_point >= kBytes.size()) return std::nullopt;
    const int byte = kBytes[step.code_point];
    if (byte == kNoByte) return std::nullopt;
    bytes += static_cast<char>(byte);
    position += step.length;
  }
  return bytes;
}

}  // namespace sluice
