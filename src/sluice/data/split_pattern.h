// SPDX-License-Identifier: Apache-2.0
// The regular expression with which a tokenizer cuts text into words. tokenizer.json states it in Oniguruma's syntax;
// we match with PCRE2. The two agree on a common part of their syntax, which all Qwen tokenizers keep to; a pattern
// that leaves it is refused by name, since it could mean two things.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

class SplitPattern {
 public:
  // Data error if `oniguruma` is broken, unsupported or can match nothing at all.
  explicit SplitPattern(std::string_view oniguruma);

  // Walks through the pieces of a text: its matches, and what stands between matches ("Isolated" of tokenizer.json).
  class Pieces {
   public:
    Pieces(const SplitPattern& pattern, std::string_view text);  // valid UTF-8; both must outlive this object
    // Never an empty piece; nothing at the end. Data error if the match needs too much time or memory.
    std::optional<std::string_view> next();

   private:
    void find_match();
    const SplitPattern& pattern_;
    std::string_view text_;
    std::size_t position_ = 0, match_begin_ = 0, match_end_ = 0;  // the match at or after position_
    std::unique_ptr<void, void (*)(void*)> match_data_;
  };

 private:
  std::string oniguruma_;
  std::shared_ptr<const void> code_;
};

// The same pattern in PCRE2's syntax, with Unicode 16's letters, marks and numbers whatever PCRE2's own version.
std::string to_pcre2(std::string_view oniguruma);

}  // namespace sluice
