// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/tokenizer_file.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace {

using nlohmann::json;

// The largest published vocabularies have 262,144 tokens and 20 MB files.
constexpr std::uint64_t kMostFileBytes = std::uint64_t{256} << 20;
constexpr std::int64_t kMostIds = std::int64_t{1} << 22;

// The text of a JSON value, short enough for a message. What holds others is named alone: a file may nest them without
// end.
std::string shown(const json& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  auto text = value.dump(-1, ' ', true);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

// A JSON value that knows where it stands, so that every complaint names file and key.
class Node {
 public:
  Node(const std::string& file, std::string key, json& value) : file_(file), key_(std::move(key)), value_(value) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail_data("{}: {}: {}", file_, key_, fmt::format(format, std::forward<Args>(args)...));
  }
  [[noreturn]] void expected(std::string_view what) const { refuse("expected {}, found {}", what, shown(value_)); }

  json& value() const { return value_; }
  bool is_null() const { return value_.is_null(); }
  Node operator[](const std::string& name) const {
    if (!value_.is_object()) expected("an object");
    const auto found = value_.find(name);
    if (found == value_.end()) refuse("\"{}\" is missing", name);
    return {file_, key_.empty() ? name : key_ + "." + name, *found};
  }
  std::optional<Node> find(const std::string& name) const {
    if (!value_.is_object()) expected("an object");
    if (!value_.contains(name)) return std::nullopt;
    return (*this)[name];
  }
  Node item(std::size_t index) const { return {file_, fmt::format("{}[{}]", key_, index), value_[index]}; }

  json::object_t& object() const {
    if (!value_.is_object()) expected("an object");
    return value_.get_ref<json::object_t&>();
  }
  json::array_t& array() const {
    if (!value_.is_array()) expected("a list");
    return value_.get_ref<json::array_t&>();
  }
  std::string& string() const {
    if (!value_.is_string()) expected("a string");
    return value_.get_ref<std::string&>();
  }
  bool boolean() const {
    if (!value_.is_boolean()) expected("true or false");
    return value_.get<bool>();
  }
  TokenId id() const {
    if (!value_.is_number_integer()) expected("an id");
    const bool in_range = value_.is_number_unsigned() && value_.get<std::uint64_t>() < std::uint64_t{kMostIds};
    if (!in_range) expected(fmt::format("an id from 0 to {}", kMostIds - 1));
    return value_.get<TokenId>();
  }

  void allow_only(std::initializer_list<std::string_view> names) const {
    for (const auto& [name, ignored] : object()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) refuse("\"{}\" is not supported", name);
    }
  }
  // For keys that change ids: only the value that means "off" is supported. An absent key is off.
  void require(const std::string& name, std::initializer_list<json> supported) const {
    const auto node = find(name);
    if (!node || std::find(supported.begin(), supported.end(), node->value()) != supported.end()) return;
    std::string list;
    for (const auto& value : supported) list += (list.empty() ? "" : " or ") + shown(value);
    node->expected(list + ", as in Qwen's files (others are not supported)");
  }

 private:
  const std::string& file_;
  std::string key_;
  json& value_;
};

json parse_json(const std::filesystem::path& path) {
  const auto text = read_file(path, kMostFileBytes);
  try {
    return json::parse(text);
  } catch (const json::parse_error& error) {
    const std::string_view message = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    fail_data("{}: not JSON: {}", path.string(), message.substr(std::min(message.size(), message.find("] ") + 2)));
  }
}

void require_type(const Node& node, std::string_view type) {
  if (node["type"].string() != type) node["type"].expected(fmt::format("\"{}\"; others are not supported", type));
}

bool read_normalizer(const Node& node) {
  if (node.is_null()) return false;
  require_type(node, "NFC");
  node.allow_only({"type"});
  return true;
}

void check_byte_level(const Node& node) {
  require_type(node, "ByteLevel");
  node.allow_only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
}

std::string read_pattern(const Node& node) {
  require_type(node, "Sequence");
  node.allow_only({"type", "pretokenizers"});
  const auto steps = node["pretokenizers"];
  if (steps.array().size() != 2) steps.expected("a Split and a ByteLevel");
  const auto split = steps.item(0);
  require_type(split, "Split");
  split.allow_only({"type", "pattern", "behavior", "invert"});
  split["pattern"].allow_only({"Regex"});
  if (split["behavior"].string() != "Isolated") split["behavior"].expected("\"Isolated\"; others are not supported");
  split.require("invert", {false});
  const auto byte_level = steps.item(1);
  check_byte_level(byte_level);
  if (byte_level["add_prefix_space"].boolean()) byte_level["add_prefix_space"].expected("false");
  if (byte_level["use_regex"].boolean()) byte_level["use_regex"].expected("false");
  return split["pattern"]["Regex"].string();
}

std::vector<AddedToken> read_added_tokens(const Node& node) {
  std::vector<AddedToken> tokens;
  std::unordered_set<std::string> contents;
  for (std::size_t i = 0; i < node.array().size(); ++i) {
    const auto entry = node.item(i);
    entry.allow_only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token{.id = entry["id"].id(),
                     .content = entry["content"].string(),
                     .special = entry["special"].boolean(),
                     .normalized = entry["normalized"].boolean(),
                     .lstrip = entry["lstrip"].boolean(),
                     .rstrip = entry["rstrip"].boolean(),
                     .single_word = entry["single_word"].boolean()};
    if (token.content.empty()) entry["content"].refuse("is empty");
    if (!contents.insert(token.content).second) entry["content"].refuse("\"{}\" is there twice", token.content);
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// Moves the tokens out of `vocab`.
Vocabulary read_vocabulary(const Node& vocab, const Node& added_tokens, const std::vector<AddedToken>& added) {
  TokenId highest = -1;
  for (auto& [token, id] : vocab.object()) highest = std::max(highest, vocab[token].id());
  for (const auto& token : added) highest = std::max(highest, token.id);
  Vocabulary vocabulary(static_cast<std::size_t>(highest + 1));

  const auto add = [&](const Node& where, std::string token, TokenId id) {
    if (token.empty()) where.refuse("an empty token has id {}", id);
    const auto* other = vocabulary.token(id);
    if (other != nullptr) where.refuse("id {} belongs to \"{}\" and to \"{}\"", id, *other, token);
    if (const auto other_id = vocabulary.find(token))
      where.refuse("\"{}\" has the ids {} and {}", token, *other_id, id);
    vocabulary.add(std::move(token), id);
  };
  auto& object = vocab.object();
  while (!object.empty()) {
    auto entry = object.extract(object.begin());
    add(vocab, std::move(entry.key()), entry.mapped().get<TokenId>());
  }
  for (std::size_t i = 0; i < added.size(); ++i) {
    if (vocabulary.find(added[i].content) == added[i].id) continue;  // trained as part of the vocabulary
    add(added_tokens.item(i), added[i].content, added[i].id);
  }
  return vocabulary;
}

std::vector<TokenizerFile::Merge> read_merges(const Node& node, const Vocabulary& vocabulary) {
  std::vector<TokenizerFile::Merge> merges;
  merges.reserve(node.array().size());
  std::string joined;
  for (std::size_t i = 0; i < node.array().size(); ++i) {
    const auto& entry = node.value()[i];
    std::string_view left, right;
    if (entry.is_string()) {  // "a b", as files before 2024 have it; the alphabet has no space
      const std::string_view both = entry.get_ref<const std::string&>();
      const auto space = both.find(' ');
      left = both.substr(0, space);
      right = space == both.npos ? "" : both.substr(space + 1);
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      left = entry[0].get_ref<const std::string&>();
      right = entry[1].get_ref<const std::string&>();
    } else {
      node.item(i).expected("\"a b\" or [\"a\", \"b\"]");
    }
    joined.assign(left).append(right);
    const auto id_of = [&](std::string_view token) {
      const auto id = vocabulary.find(token);
      if (!id) node.item(i).refuse("\"{}\" is not in the vocabulary", token);
      return *id;
    };
    merges.push_back({id_of(left), id_of(right), id_of(joined)});
  }
  return merges;
}

void check_model(const Node& model) {
  require_type(model, "BPE");
  model.allow_only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                    "byte_fallback", "ignore_merges", "vocab", "merges"});
  // `unk_token` and `fuse_unk` say nothing here: every byte has a token, so none is unknown.
  model.require("dropout", {nullptr, 0.0});
  model.require("continuing_subword_prefix", {nullptr, ""});
  model.require("end_of_word_suffix", {nullptr, ""});
  model.require("byte_fallback", {false});
}

}  // namespace

bool Vocabulary::add(std::string token, TokenId id) {
  auto& place = tokens_[static_cast<std::size_t>(id)];
  if (!place.empty() || ids_.contains(token)) return false;
  place = std::move(token);
  ids_.emplace(place, id);
  return true;
}

std::optional<TokenId> Vocabulary::find(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* Vocabulary::token(TokenId id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= tokens_.size()) return nullptr;
  const auto& token = tokens_[static_cast<std::size_t>(id)];
  return token.empty() ? nullptr : &token;
}

TokenizerFile read_tokenizer_file(const std::filesystem::path& path) {
  const auto file = path.string();
  auto document = parse_json(path);
  const Node root(file, "", document);
  // `truncation`, `padding` and `post_processor` act on finished ids and are the caller's business, as in transformers.
  root.allow_only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                   "decoder", "model"});
  const auto model = root["model"];
  check_model(model);
  check_byte_level(root["decoder"]);
  if (const auto post = root.find("post_processor"); post && !post->is_null()) check_byte_level(*post);

  const auto ignore_merges = model.find("ignore_merges");
  auto added_tokens = read_added_tokens(root["added_tokens"]);
  auto vocabulary = read_vocabulary(model["vocab"], root["added_tokens"], added_tokens);
  auto merges = read_merges(model["merges"], vocabulary);
  return {.vocabulary = std::move(vocabulary),
          .merges = std::move(merges),
          .added_tokens = std::move(added_tokens),
          .pattern = read_pattern(root["pre_tokenizer"]),
          .nfc = read_normalizer(root["normalizer"]),
          .ignore_merges = ignore_merges && ignore_merges->boolean()};
}

TokenizerConfig read_tokenizer_config(const std::filesystem::path& path, const Vocabulary& vocabulary) {
  const auto file = path.string();
  auto document = parse_json(path);
  const Node root(file, "", document);
  const auto token_name = [&](const std::string& key) -> std::optional<std::string> {
    const auto node = root.find(key);
    if (!node || node->is_null()) return std::nullopt;
    auto name = node->value().is_object() ? (*node)["content"].string() : node->string();
    if (!vocabulary.find(name)) node->refuse("\"{}\" is not a token of the tokenizer.json beside this file", name);
    return name;
  };
  if (const auto decoder = root.find("added_tokens_decoder")) {
    for (const auto& [id_text, ignored] : decoder->object()) {
      const auto entry = (*decoder)[id_text];
      const auto& content = entry["content"].string();
      TokenId id = -1;
      std::from_chars(id_text.data(), id_text.data() + id_text.size(), id);
      if (vocabulary.find(content) != id) {
        entry.refuse("\"{}\" is not the token of this id in the tokenizer.json beside this file", content);
      }
    }
  }
  return {.eos_token = token_name("eos_token"), .pad_token = token_name("pad_token")};
}

}  // namespace sluice
