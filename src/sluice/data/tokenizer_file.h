// SPDX-License-Identifier: Apache-2.0
// Reads and checks the tokenizer files of a model folder. Only tokenizer.cpp uses this.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sluice/data/added_tokens.h"
#include "sluice/data/tokenizer.h"

namespace sluice {

// Tokens by id and ids by token. Ids may leave gaps.
class Vocabulary {
 public:
  explicit Vocabulary(std::size_t size) : tokens_(size) {}
  Vocabulary(const Vocabulary&) = delete;  // ids_ points into tokens_; a move keeps the strings where they are
  Vocabulary(Vocabulary&&) = default;
  bool add(std::string token, TokenId id);  // false if the id or the token is taken; id < size
  std::optional<TokenId> find(std::string_view token) const;
  const std::string* token(TokenId id) const;          // nullptr if no token has the id
  std::size_t size() const { return tokens_.size(); }  // highest id + 1

 private:
  std::vector<std::string> tokens_;  // empty in gaps: no token is
  std::unordered_map<std::string_view, TokenId> ids_;
};

struct TokenizerFile {
  struct Merge {
    TokenId left, right, merged;
  };
  Vocabulary vocabulary;      // added tokens included
  std::vector<Merge> merges;  // in the order of their rank; no pair twice
  std::vector<AddedToken> added_tokens;
  std::string pattern;         // of the pre-tokenizer, in Oniguruma's syntax
  bool nfc = false;            // text is normalised to NFC first
  bool ignore_merges = false;  // a word that is a token is taken whole
};

// Data error with file and key for anything damaged or not supported.
TokenizerFile read_tokenizer_file(const std::filesystem::path& path);

struct TokenizerConfig {
  std::optional<std::string> eos_token, pad_token;
};

// Checks besides that the added tokens which tokenizer_config.json repeats are those of the tokenizer.
TokenizerConfig read_tokenizer_config(const std::filesystem::path& path, const Vocabulary& vocabulary);

}  // namespace sluice
