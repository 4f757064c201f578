// SPDX-License-Identifier: Apache-2.0
// Tokens that are found in the text as they stand, before it is cut into words: "<|im_end|>", "<think>".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/data/tokenizer.h"

namespace sluice {

// One entry of `added_tokens` in tokenizer.json.
struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;  // a control token: left out of decoded text on request, plain text in SpecialTokens::kLiteral
  bool normalized = false;   // looked for in the normalised text, not in the text as it came
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool single_word = false;  // counts only where no letter or digit touches it
};

// Finds the leftmost token of the text, the longest where several begin at one place, and goes on after it.
class AddedTokenMatcher {
 public:
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);  // contents not empty, all different

  struct Piece {
    std::string_view text;
    std::optional<TokenId> id;  // none: text between added tokens
  };
  // In order; no empty pieces. `text` is valid UTF-8.
  std::vector<Piece> split(std::string_view text, SpecialTokens mode) const;

 private:
  static constexpr std::int32_t kNone = -1;
  struct Node {  // of a trie over bytes; children are a list of siblings
    std::int32_t first_child = kNone, next_sibling = kNone;
    std::int32_t token = kNone;  // the token that ends here
    char byte = 0;
  };
  std::int32_t child(std::int32_t node, char byte) const;
  const AddedToken* longest_at(std::string_view text, std::size_t position) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;  // nodes_[0] is the root
};

}  // namespace sluice
