// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back, as the tokenizer.json of a Qwen model folder says: added tokens, NFC, words by a regular
// expression, byte-level BPE. Ids equal those of Hugging Face's `tokenizers`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

using TokenId = std::int32_t;

// What "<|im_end|>" inside a text becomes. It concerns added tokens marked special; others ("<think>", "<tool_call>")
// are tokens in both modes, since answers hold them as ordinary text.
enum class SpecialTokens {
  kLiteral,  // text like any other: what users write cannot end a turn
  kControl,  // the control token: for rendered templates
};

// Made once, then shared: copies are cheap and refer to the same tables. Safe for use by several threads at once.
class Tokenizer {
 public:
  // Reads tokenizer.json, and tokenizer_config.json (if there is one) for the names of the end and padding tokens.
  // Whatever would change ids and is not supported is refused: data error with file, key and value.
  static Tokenizer load(const std::filesystem::path& model_folder);

  // Adds no token of its own. Data error with the byte position if `text` is not UTF-8.
  std::vector<TokenId> encode(std::string_view text, SpecialTokens special) const;

  // Bytes that are not UTF-8 (a character cut between ids) become U+FFFD. Data error for an id that no token has.
  std::string decode(std::span<const TokenId> ids, bool skip_special = false) const;

  // Decodes ids one by one, for display while they are made. The bytes of an unfinished character are held back until
  // it is complete or cannot become so: all push() results and finish() joined are decode() of all ids.
  class Stream;

  std::int64_t vocab_size() const;  // highest id + 1, added tokens included
  std::optional<TokenId> token_to_id(std::string_view token) const;
  const std::string& id_to_token(
      TokenId id) const;  // as the file writes it ("Ġhello"); data error if no token has the id
  bool is_special(TokenId id) const;
  std::optional<TokenId> eos_id() const;
  std::optional<TokenId> pad_id() const;

 private:
  struct Parts;
  explicit Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}
  const std::string& bytes_of(TokenId id) const;
  std::shared_ptr<const Parts> parts_;
};

class Tokenizer::Stream {
 public:
  explicit Stream(Tokenizer tokenizer, bool skip_special = false)
      : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}
  std::string push(TokenId id);  // the text that is complete now
  std::string finish();          // what was held back, as U+FFFD; the stream may then begin anew

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  std::string held_;  // at most 3 bytes between calls
};

}  // namespace sluice
