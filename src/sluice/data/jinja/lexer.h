// SPDX-License-Identifier: Apache-2.0
// Cuts a template into tokens. White space is treated as transformers sets Jinja up for chat templates: trim_blocks
// (the newline after a block or comment goes) and lstrip_blocks (blanks before a block or comment that begins its line
// go).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sluice::jinja {

struct Token {
  enum class Kind {
    kText,
    kBlockBegin,
    kBlockEnd,
    kOutputBegin,
    kOutputEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd
  };
  Kind kind;
  std::string text;  // decoded, for strings
  int line;          // 1-based
};

// Throws Problem with the line in front, e.g. "7: the comment is not closed".
std::vector<Token> tokenize(std::string_view source);

}  // namespace sluice::jinja
