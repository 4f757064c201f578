// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/added_tokens.h"

#include <algorithm>
#include <utility>

#include "sluice/data/unicode.h"
#include "sluice/data/utf8.h"

namespace sluice {
namespace {

// The first byte of the character that ends before `position`, which is not 0.
std::size_t character_before(std::string_view text, std::size_t position) {
  do --position;
  while ((static_cast<unsigned char>(text[position]) & 0xC0) == 0x80);
  return position;
}

bool touches_word(std::string_view text, std::size_t begin, std::size_t end) {
  if (begin > 0 && is_word_character(utf8_step(text, character_before(text, begin)).code_point)) return true;
  return end < text.size() && is_word_character(utf8_step(text, end).code_point);
}

std::size_t without_space_before(std::string_view text, std::size_t begin) {
  while (begin > 0) {
    const auto before = character_before(text, begin);
    if (!is_white_space(utf8_step(text, before).code_point)) break;
    begin = before;
  }
  return begin;
}

std::size_t without_space_after(std::string_view text, std::size_t end) {
  while (end < text.size()) {
    const auto step = utf8_step(text, end);
    if (!is_white_space(step.code_point)) break;
    end += step.length;
  }
  return end;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), nodes_(1) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    std::int32_t node = 0;
    for (const char byte : tokens_[i].content) {
      auto next = child(node, byte);
      if (next == kNone) {
        next = static_cast<std::int32_t>(nodes_.size());
        auto& parent = nodes_[static_cast<std::size_t>(node)];
        nodes_.push_back({kNone, std::exchange(parent.first_child, next), kNone, byte});
      }
      node = next;
    }
    nodes_[static_cast<std::size_t>(node)].token = static_cast<std::int32_t>(i);
  }
}

std::int32_t AddedTokenMatcher::child(std::int32_t node, char byte) const {
  auto next = nodes_[static_cast<std::size_t>(node)].first_child;
  while (next != kNone && nodes_[static_cast<std::size_t>(next)].byte != byte) {
    next = nodes_[static_cast<std::size_t>(next)].next_sibling;
  }
  return next;
}

const AddedToken* AddedTokenMatcher::longest_at(std::string_view text, std::size_t position) const {
  const AddedToken* longest = nullptr;
  for (std::int32_t node = 0; position < text.size(); ++position) {
    node = child(node, text[position]);
    if (node == kNone) break;
    if (const auto token = nodes_[static_cast<std::size_t>(node)].token; token != kNone) {
      longest = &tokens_[static_cast<std::size_t>(token)];
    }
  }
  return longest;
}

std::vector<AddedTokenMatcher::Piece> AddedTokenMatcher::split(std::string_view text, SpecialTokens mode) const {
  std::vector<Piece> pieces;
  std::size_t done = 0;  // the pieces so far reach to here
  for (std::size_t position = 0; position < text.size();) {
    const auto* token = longest_at(text, position);
    if (token == nullptr) {
      ++position;
      continue;
    }
    auto begin = position;
    auto end = position + token->content.size();
    position = end;  // a match that does not count still uses up its text
    if (token->special && mode == SpecialTokens::kLiteral) continue;
    if (token->single_word && touches_word(text, begin, end)) continue;
    if (token->lstrip) begin = std::max(without_space_before(text, begin), done);
    if (token->rstrip) end = without_space_after(text, end);
    if (done < begin) pieces.push_back({text.substr(done, begin - done), std::nullopt});
    pieces.push_back({text.substr(begin, end - begin), token->id});
    done = end;
  }
  if (done < text.size()) pieces.push_back({text.substr(done), std::nullopt});
  return pieces;
}

}  // namespace sluice
