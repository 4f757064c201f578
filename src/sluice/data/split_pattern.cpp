// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/split_pattern.h"

#include <pcre2.h>

#include <array>
#include <cctype>
#include <cstdint>
#include <span>

#include "sluice/core/error.h"
#include "sluice/data/unicode_tables.h"

namespace sluice {
namespace {

constexpr std::size_t kMostPatternBytes = std::size_t{64} * 1024;

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

const pcre2_code* compiled(const std::shared_ptr<const void>& code) {
  return static_cast<const pcre2_code*>(code.get());
}

// Reads the pattern from left to right and writes it anew; whatever it does not know, it refuses.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  std::string run() {
    while (position_ < pattern_.size()) step();
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view construct) const {
    fail_data("regex: \"{}\" at byte {} of {} is not supported: it can mean different things to different engines",
              construct, position_, pattern_);
  }
  bool at(std::string_view what) const { return pattern_.substr(position_).starts_with(what); }
  void copy(std::size_t bytes) {
    out_ += pattern_.substr(position_, bytes);
    position_ += bytes;
  }

  void step() {
    if (at("\\")) return escape();
    if (in_class_) return class_member();
    if (at("[")) return open_class();
    if (at("(")) return open_group();
    for (const char* anchor : {"^", "$", "."}) {
      if (at(anchor)) refuse(anchor);
    }
    if (at("}+")) refuse("}+");
    copy(1);
  }

  void class_member() {
    if (at("[")) refuse("[ in a class");
    if (at("&&")) refuse("&& in a class");
    if (at("]")) in_class_ = false;
    copy(1);
  }

  void open_class() {
    copy(at("[^") ? 2 : 1);
    if (at("]")) refuse("an empty class");
    in_class_ = true;
  }

  void open_group() {
    for (const std::string_view kind : {"(?i:", "(?:", "(?!", "(?="}) {
      if (at(kind)) return copy(kind.size());
    }
    if (at("(?") || at("(*")) refuse(pattern_.substr(position_, 3));
    copy(1);
  }

  void escape() {
    const char kind = position_ + 1 < pattern_.size() ? pattern_[position_ + 1] : '\0';
    switch (kind) {
      case 'r':
      case 'n':
      case 't':
        return copy(2);
      case 's':  // PCRE2's own \s has U+180E, which left the property in Unicode 6.3
        out_ += "\\p{White_Space}";
        position_ += 2;
        return;
      case 'S':
        out_ += "\\P{White_Space}";
        position_ += 2;
        return;
      case 'p':
        return category();
      default:
        break;
    }
    const bool is_punctuation = kind > ' ' && kind < 0x7F && std::isalnum(static_cast<unsigned char>(kind)) == 0;
    if (!is_punctuation) refuse(pattern_.substr(position_, 2));
    copy(2);
  }

  void category() {
    if (at("\\p{L}")) return append_category("\\p{L}", kNewerLetters);
    if (at("\\p{M}")) return append_category("\\p{M}", kNewerMarks);
    if (at("\\p{N}")) return append_category("\\p{N}", kNewerNumbers);
    refuse(pattern_.substr(position_, pattern_.substr(position_).find('}') + 1));
  }

  void append_category(std::string_view escape, std::span<const CodePointRange> newer) {
    if (!in_class_) out_ += '[';
    out_ += escape;
    for (const auto& range : newer) {
      out_ += fmt::format("\\x{{{:X}}}-\\x{{{:X}}}", static_cast<std::uint32_t>(range.low),
                          static_cast<std::uint32_t>(range.high));
    }
    if (!in_class_) out_ += ']';
    position_ += escape.size();
  }

  std::string_view pattern_;
  std::size_t position_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

std::string to_pcre2(std::string_view oniguruma) { return Translator(oniguruma).run(); }

SplitPattern::SplitPattern(std::string_view oniguruma) : oniguruma_(oniguruma) {
  if (oniguruma.size() > kMostPatternBytes) {
    fail_data("regex: {} bytes, more than the {} that a pattern may have", oniguruma.size(), kMostPatternBytes);
  }
  const auto pattern = to_pcre2(oniguruma);
  int error = 0;
  PCRE2_SIZE error_offset = 0;
  auto* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
                             &error, &error_offset, nullptr);
  if (code == nullptr) fail_data("regex: {}: {}", oniguruma, pcre2_message(error));
  code_ = std::shared_ptr<const void>(
      code, [](const void* p) { pcre2_code_free(const_cast<pcre2_code*>(static_cast<const pcre2_code*>(p))); });
  std::uint32_t matches_empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) fail_data("regex: {}: can match an empty text, which splits nothing", oniguruma);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where the machine forbids new code, matching is slower and the same
}

SplitPattern::Pieces::Pieces(const SplitPattern& pattern, std::string_view text)
    : pattern_(pattern), text_(text), match_data_(pcre2_match_data_create(1, nullptr), [](void* p) {
        pcre2_match_data_free(static_cast<pcre2_match_data*>(p));
      }) {
  if (match_data_ == nullptr) fail(ExitCode::kMemory, "regex: no memory left for matching");
}

void SplitPattern::Pieces::find_match() {
  auto* data = static_cast<pcre2_match_data*>(match_data_.get());
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
  const auto match = [&](std::uint32_t options) {
    return pcre2_match(compiled(pattern_.code_), subject, text_.size(), position_, PCRE2_NO_UTF_CHECK | options, data,
                       nullptr);
  };
  int result = match(0);
  // The machine code's stack is small; the interpreter keeps its stack on the heap.
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(PCRE2_NO_JIT);
  if (result == PCRE2_ERROR_NOMATCH) {
    match_begin_ = match_end_ = text_.size();
    return;
  }
  if (result < 0) {
    fail_data("regex: {}: gave up on the text at byte {}: {}", pattern_.oniguruma_, position_, pcre2_message(result));
  }
  const auto* offsets = pcre2_get_ovector_pointer(data);
  match_begin_ = offsets[0];
  match_end_ = offsets[1];
}

std::optional<std::string_view> SplitPattern::Pieces::next() {
  if (position_ == text_.size()) return std::nullopt;
  if (position_ == match_end_) find_match();
  const auto end = position_ < match_begin_ ? match_begin_ : match_end_;
  const auto piece = text_.substr(position_, end - position_);
  position_ = end;
  return piece;
}

}  // namespace sluice
