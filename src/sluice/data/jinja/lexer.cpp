// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "sluice/data/jinja/value.h"
#include "sluice/data/utf8.h"

namespace sluice::jinja {
namespace {

using Kind = Token::Kind;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  std::vector<Token> run() {
    while (position_ < source_.size()) {
      text_and_opening();
    }
    add(Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(int line, std::string_view what) const { throw Problem(fmt::format("{}: {}", line, what)); }

  void add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  bool at(std::string_view what) const { return source_.substr(position_, what.size()) == what; }

  void advance(std::size_t count) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(position_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(position_ + count), '\n'));
    position_ += count;
  }
  void skip_blanks() {
    std::size_t end = position_;
    while (end < source_.size() && is_blank(source_[end])) ++end;
    advance(end - position_);
  }

  // The text up to the next "{{", "{%" or "{#", and what follows it.
  void text_and_opening() {
    std::size_t open = position_;
    while ((open = source_.find('{', open)) != std::string_view::npos) {
      const char next = open + 1 < source_.size() ? source_[open + 1] : '\0';
      if (next == '{' || next == '%' || next == '#') break;
      ++open;
    }
    if (open == std::string_view::npos) {
      add_text(source_.substr(position_));
      advance(source_.size() - position_);
      return;
    }
    const char form = source_[open + 1];
    const char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
    const bool signed_tag = sign == '-' || sign == '+';
    add_text(before_tag(source_.substr(position_, open - position_), signed_tag ? sign : '\0', form != '{'));
    advance(open - position_ + (signed_tag ? 3 : 2));
    if (form == '#') {
      comment();
    } else if (form == '{') {
      add(Kind::kOutputBegin, "{{");
      inside("}}", Kind::kOutputEnd);
    } else if (!raw_block()) {
      add(Kind::kBlockBegin, "{%");
      inside("%}", Kind::kBlockEnd);
    }
  }

  void add_text(std::string_view text) {
    if (!text.empty()) add(Kind::kText, std::string(text));
  }

  std::string_view before_tag(std::string_view text, char sign, bool is_block) const {
    if (sign == '-') {
      while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
    } else if (sign != '+' && is_block) {
      const auto line_start = text.rfind('\n') + 1;  // 0 without a newline
      const bool starts_line = line_start > 0 || position_ == 0 || source_[position_ - 1] == '\n';
      if (starts_line && text.find_first_not_of(" \t", line_start) == std::string_view::npos)
        text = text.substr(0, line_start);
    }
    return text;
  }

  // Behind a block or comment: '-' takes all white space, '+' none, otherwise one newline goes.
  void after_tag(char sign) {
    if (sign == '-') {
      skip_blanks();
    } else if (sign != '+' && at("\n")) {
      advance(1);
    }
  }

  void comment() {
    const auto end = source_.find("#}", position_);
    if (end == std::string_view::npos) fail(line_, "the comment that begins here is not closed by '#}'");
    const char sign = end > position_ ? source_[end - 1] : '\0';
    advance(end + 2 - position_);
    after_tag(sign);
  }

  // {% raw %}...{% endraw %}: its inside is text. False, and nothing read, if another block stands here.
  bool raw_block() {
    std::size_t end = position_;
    const auto word = [&](std::string_view name) {
      while (end < source_.size() && is_blank(source_[end])) ++end;
      if (source_.substr(end, name.size()) != name) return false;
      end += name.size();
      while (end < source_.size() && is_blank(source_[end])) ++end;
      return true;
    };
    if (!word("raw")) return false;
    const bool strip = source_.substr(end, 3) == "-%}";
    if (!strip && source_.substr(end, 2) != "%}") return false;
    const int first_line = line_;
    advance(end + (strip ? 3 : 2) - position_);
    if (strip) skip_blanks();
    for (auto open = source_.find("{%", position_); open != std::string_view::npos;
         open = source_.find("{%", open + 2)) {
      end = open + 2;
      const char sign = end < source_.size() && (source_[end] == '-' || source_[end] == '+') ? source_[end++] : '\0';
      if (!word("endraw")) continue;
      const char end_sign =
          end < source_.size() && (source_[end] == '-' || source_[end] == '+') ? source_[end++] : '\0';
      if (source_.substr(end, 2) != "%}") continue;
      add_text(before_tag(source_.substr(position_, open - position_), sign, true));
      advance(end + 2 - position_);
      after_tag(end_sign);
      return true;
    }
    fail(first_line, "the 'raw' block that begins here has no 'endraw'");
  }

  void inside(std::string_view closing, Kind closing_kind) {
    const int first_line = line_;
    std::string brackets;
    while (true) {
      skip_blanks();
      if (position_ >= source_.size())
        fail(first_line, fmt::format("the tag that begins here is not closed by '{}'", closing));
      if (brackets.empty()) {
        const char sign = source_[position_];
        const bool is_signed = (sign == '-' || sign == '+') && source_.substr(position_ + 1, 2) == closing;
        if (is_signed || at(closing)) {
          add(closing_kind, std::string(closing));
          advance(is_signed ? 3 : 2);
          if (closing_kind == Kind::kBlockEnd) {
            after_tag(is_signed ? sign : '\0');
          } else if (is_signed && sign == '-') {
            skip_blanks();
          }
          return;
        }
      }
      const char c = source_[position_];
      if (c == '\'' || c == '"') {
        string();
      } else if (is_digit(c)) {
        number();
      } else if (starts_name(c)) {
        std::size_t end = position_;
        while (end < source_.size() && (starts_name(source_[end]) || is_digit(source_[end]))) ++end;
        add(Kind::kName, std::string(source_.substr(position_, end - position_)));
        advance(end - position_);
      } else {
        operator_token(brackets);
      }
    }
  }

  void operator_token(std::string& brackets) {
    static constexpr std::array<std::string_view, 6> kPairs = {"==", "!=", "<=", ">=", "//", "**"};
    for (const auto pair : kPairs) {
      if (at(pair)) {
        add(Kind::kOperator, std::string(pair));
        advance(2);
        return;
      }
    }
    const char c = source_[position_];
    static constexpr std::string_view kSingles = "+-*/%~<>=.,:|()[]{}";
    if (kSingles.find(c) == std::string_view::npos) fail(line_, fmt::format("unexpected character '{}'", c));
    if (c == '(' || c == '[' || c == '{') brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (brackets.empty() || brackets.back() != c) fail(line_, fmt::format("'{}' closes nothing", c));
      brackets.pop_back();
    }
    add(Kind::kOperator, std::string(1, c));
    advance(1);
  }

  void number() {
    std::size_t end = position_;
    const auto digits = [&] {
      while (end < source_.size() && (is_digit(source_[end]) || source_[end] == '_')) ++end;
    };
    digits();
    bool is_float = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      is_float = true;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      std::size_t exponent = end + 1;
      if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
      if (exponent < source_.size() && is_digit(source_[exponent])) {
        is_float = true;
        end = exponent;
        digits();
      }
    }
    std::string text(source_.substr(position_, end - position_));
    std::erase(text, '_');
    add(is_float ? Kind::kFloat : Kind::kInteger, text);
    advance(end - position_);
  }

  void string() {
    const char quote = source_[position_];
    const int first_line = line_;
    std::string text;
    std::size_t at_byte = position_ + 1;
    while (true) {
      if (at_byte >= source_.size()) fail(first_line, "the string that begins here is not closed");
      const char c = source_[at_byte++];
      if (c == quote) break;
      if (c != '\\') {
        text += c;
      } else {
        escape(text, at_byte, first_line);
      }
    }
    tokens_.push_back({Kind::kString, std::move(text), first_line});
    advance(at_byte - position_);
  }

  // Python's escapes; `at_byte` stands behind the backslash. An unknown one keeps its backslash.
  void escape(std::string& text, std::size_t& at_byte, int first_line) const {
    if (at_byte >= source_.size()) fail(first_line, "the string that begins here is not closed");
    static constexpr std::string_view kNames = "ntrabfv0\\'\"";
    static constexpr std::string_view kMeanings = {"\n\t\r\a\b\f\v\0\\'\"", 11};
    const char c = source_[at_byte++];
    const std::size_t hex_digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (hex_digits > 0) {
      const auto digits = source_.substr(at_byte, hex_digits);
      if (digits.size() < hex_digits || digits.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos) {
        fail(first_line, fmt::format("'\\{}' in a string needs {} hexadecimal digits", c, hex_digits));
      }
      const auto code_point = std::stoul(std::string(digits), nullptr, 16);
      if (code_point > 0x10FFFF || (code_point >= 0xD800 && code_point <= 0xDFFF)) {
        fail(first_line, fmt::format("'\\{}{}' in a string is no character", c, digits));
      }
      append_utf8(text, static_cast<char32_t>(code_point));
      at_byte += hex_digits;
    } else if (const auto known = kNames.find(c); known != std::string_view::npos) {
      text += kMeanings[known];
    } else if (c != '\n') {
      text += '\\';
      text += c;
    }
  }

  std::string_view source_;
  std::size_t position_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace sluice::jinja
