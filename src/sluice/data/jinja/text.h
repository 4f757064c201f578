// SPDX-License-Identifier: Apache-2.0
// Text that remembers where it came from. A template's markers ("<|im_start|>") become control tokens, the same
// characters in a user's message must not; so each byte of a string knows whether the template or the data wrote it,
// and every string operation of the interpreter carries that along.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::jinja {

enum class Origin : char { kTemplate = 't', kData = 'd' };

// Valid UTF-8. Positions are bytes unless a name says otherwise.
class Text {
 public:
  Text() = default;
  Text(std::string_view bytes, Origin origin) : bytes_(bytes), origins_(bytes.size(), static_cast<char>(origin)) {}

  const std::string& str() const { return bytes_; }
  std::size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  Origin origin(std::size_t byte) const { return static_cast<Origin>(origins_[byte]); }

  Text substr(std::size_t begin, std::size_t count = std::string::npos) const {
    Text piece;
    piece.bytes_ = bytes_.substr(begin, count);
    piece.origins_ = origins_.substr(begin, count);
    return piece;
  }
  void append(const Text& other) {
    bytes_ += other.bytes_;
    origins_ += other.origins_;
  }
  void append(std::string_view bytes, Origin origin) {
    bytes_ += bytes;
    origins_.append(bytes.size(), static_cast<char>(origin));
  }

 private:
  std::string bytes_;
  std::string origins_;  // one Origin for each byte
};

// Characters of valid UTF-8.
std::size_t code_point_size(char first_byte);                  // bytes of the character that begins so
std::vector<std::size_t> code_point_starts(std::string_view);  // first byte of every character, then the size
std::size_t count_code_points(std::string_view);
char32_t code_point_at(std::string_view, std::size_t byte);
bool is_space(char32_t code_point);  // what Python's str.isspace calls a space

}  // namespace sluice::jinja
