// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/tokenizer.h"

#include <array>
#include <limits>
#include <unordered_map>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/data/added_tokens.h"
#include "sluice/data/bpe.h"
#include "sluice/data/byte_level.h"
#include "sluice/data/split_pattern.h"
#include "sluice/data/tokenizer_file.h"
#include "sluice/data/unicode.h"
#include "sluice/data/utf8.h"

namespace sluice {
namespace {

constexpr std::size_t kMostTextBytes = std::numeric_limits<std::int32_t>::max();

std::array<TokenId, 256> byte_ids(const Vocabulary& vocabulary, const std::string& file) {
  std::array<TokenId, 256> ids{};
  for (std::size_t byte = 0; byte < ids.size(); ++byte) {
    std::string character;
    append_utf8(character, byte_level_character(static_cast<std::uint8_t>(byte)));
    const auto id = vocabulary.find(character);
    if (!id)
      fail_data("{}: model.vocab: no token \"{}\" for the byte 0x{:02X}; every byte needs one", file, character, byte);
    ids[byte] = *id;
  }
  return ids;
}

// What each id stands for in a text.
std::vector<std::string> bytes_by_id(const Vocabulary& vocabulary) {
  std::vector<std::string> bytes(vocabulary.size());
  for (std::size_t id = 0; id < bytes.size(); ++id) {
    const auto* token = vocabulary.token(static_cast<TokenId>(id));
    if (token != nullptr) bytes[id] = byte_level_bytes(*token).value_or(*token);
  }
  return bytes;
}

MergeTable merge_table(const std::vector<TokenizerFile::Merge>& merges, const std::string& file) {
  MergeTable table(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& merge = merges[rank];
    if (!table.add(merge.left, merge.right, {static_cast<std::int32_t>(rank), merge.merged})) {
      fail_data("{}: model.merges[{}]: the same pair is there twice", file, rank);
    }
  }
  return table;
}

// With `ignore_merges`, a word that is a token of the model's own vocabulary is never taken apart.
std::unordered_map<std::string, TokenId> whole_words(const TokenizerFile& file) {
  std::unordered_map<std::string, TokenId> words;
  if (!file.ignore_merges) return words;
  for (std::size_t id = 0; id < file.vocabulary.size(); ++id) {
    const auto* token = file.vocabulary.token(static_cast<TokenId>(id));
    if (token == nullptr) continue;
    if (auto bytes = byte_level_bytes(*token)) words.emplace(*std::move(bytes), static_cast<TokenId>(id));
  }
  return words;
}

AddedTokenMatcher matcher(const TokenizerFile& file, bool normalized) {
  std::vector<AddedToken> tokens;
  for (auto token : file.added_tokens) {
    if (token.normalized != normalized) continue;
    if (normalized && file.nfc) token.content = to_nfc(token.content);
    tokens.push_back(std::move(token));
  }
  return AddedTokenMatcher(std::move(tokens));
}

SplitPattern split_pattern(const TokenizerFile& file, const std::string& name) {
  try {
    return SplitPattern(file.pattern);
  } catch (const Error& error) {
    fail(error.code(), "{}: pre_tokenizer: {}", name, error.what());
  }
}

}  // namespace

struct Tokenizer::Parts {
  Parts(TokenizerFile file, const std::string& name)
      : nfc(file.nfc),
        in_text(matcher(file, false)),
        in_normalized_text(matcher(file, true)),
        pattern(split_pattern(file, name)),
        encoder(byte_ids(file.vocabulary, name), merge_table(file.merges, name), whole_words(file)),
        bytes(bytes_by_id(file.vocabulary)),
        special(file.vocabulary.size(), false),
        vocabulary(std::move(file.vocabulary)) {
    for (const auto& token : file.added_tokens) special[static_cast<std::size_t>(token.id)] = token.special;
  }

  void encode_words(std::string_view text, std::vector<TokenId>& ids) const {
    SplitPattern::Pieces words(pattern, text);
    while (const auto word = words.next()) encoder.encode(*word, ids);
  }

  bool nfc;
  AddedTokenMatcher in_text, in_normalized_text;
  SplitPattern pattern;
  BytePairEncoder encoder;
  std::vector<std::string> bytes;  // by id
  std::vector<bool> special;       // by id
  Vocabulary vocabulary;
  std::optional<TokenId> eos_id, pad_id;
};

Tokenizer Tokenizer::load(const std::filesystem::path& model_folder) {
  const auto path = model_folder / "tokenizer.json";
  auto parts = std::make_shared<Parts>(read_tokenizer_file(path), path.string());
  if (const auto config_path = model_folder / "tokenizer_config.json"; std::filesystem::exists(config_path)) {
    const auto config = read_tokenizer_config(config_path, parts->vocabulary);
    if (config.eos_token) parts->eos_id = parts->vocabulary.find(*config.eos_token);
    if (config.pad_token) parts->pad_id = parts->vocabulary.find(*config.pad_token);
  }
  return Tokenizer(std::move(parts));
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  if (text.size() > kMostTextBytes) {
    fail_data("tokenizer: a text of {} bytes; at most {} at once", text.size(), kMostTextBytes);
  }
  check_utf8(text, "tokenizer");
  std::vector<TokenId> ids;
  for (const auto& piece : parts_->in_text.split(text, special)) {
    if (piece.id) {
      ids.push_back(*piece.id);
      continue;
    }
    const auto normalized = parts_->nfc ? to_nfc(piece.text) : std::string(piece.text);
    for (const auto& part : parts_->in_normalized_text.split(normalized, special)) {
      if (part.id) {
        ids.push_back(*part.id);
      } else {
        parts_->encode_words(part.text, ids);
      }
    }
  }
  return ids;
}

const std::string& Tokenizer::id_to_token(TokenId id) const {
  const auto* token = parts_->vocabulary.token(id);
  if (token == nullptr) fail_data("tokenizer: no token has the id {}; the highest id is {}", id, vocab_size() - 1);
  return *token;
}

const std::string& Tokenizer::bytes_of(TokenId id) const {
  id_to_token(id);
  return parts_->bytes[static_cast<std::size_t>(id)];
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) {
    const auto& token = bytes_of(id);
    if (!skip_special || !is_special(id)) bytes += token;
  }
  return replace_broken_utf8(bytes);
}

std::int64_t Tokenizer::vocab_size() const { return static_cast<std::int64_t>(parts_->vocabulary.size()); }

std::optional<TokenId> Tokenizer::token_to_id(std::string_view token) const { return parts_->vocabulary.find(token); }

bool Tokenizer::is_special(TokenId id) const {
  return id >= 0 && id < vocab_size() && parts_->special[static_cast<std::size_t>(id)];
}

std::optional<TokenId> Tokenizer::eos_id() const { return parts_->eos_id; }
std::optional<TokenId> Tokenizer::pad_id() const { return parts_->pad_id; }

std::string Tokenizer::Stream::push(TokenId id) {
  const auto& token = tokenizer_.bytes_of(id);
  if (skip_special_ && tokenizer_.is_special(id)) return {};
  held_ += token;
  const std::size_t complete = held_.size() - unfinished_utf8_bytes(held_);
  auto text = replace_broken_utf8(std::string_view(held_).substr(0, complete));
  held_.erase(0, complete);
  return text;
}

std::string Tokenizer::Stream::finish() { return replace_broken_utf8(std::exchange(held_, {})); }

}  // namespace sluice
