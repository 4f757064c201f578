// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/answers.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>
#include <vector>

namespace sluice {
namespace {

constexpr std::size_t kEnd = 300;  // characters of a response in which its answer is looked for

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool in_number(char c) { return is_digit(c) || c == '.' || c == ','; }

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

void erase_all(std::string& text, std::string_view part) {
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at)) text.erase(at, part.size());
}

void replace_all(std::string& text, std::string_view part, std::string_view by) {
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + by.size())) {
    text.replace(at, part.size(), by);
  }
}

// "-$1,234." is -1234. Absent unless it is a decimal number then.
std::optional<std::string> clean_number(std::string_view written) {
  std::string number(trim(written));
  erase_all(number, ",");
  erase_all(number, "$");
  if (number.ends_with('.')) number.pop_back();
  const auto digits = number.find_first_of("0123456789");
  const auto sign = number.empty() || (number[0] != '-' && number[0] != '+') ? 0U : 1U;
  const bool plain = number.find_first_not_of("0123456789.", sign) == std::string::npos;
  if (digits == std::string::npos || !plain || std::ranges::count(number, '.') > 1) return std::nullopt;
  return number;
}

// The number that begins at `begin`, with its sign and a currency sign.
std::string_view number_at(std::string_view text, std::size_t begin) {
  auto end = begin;
  if (end < text.size() && text[end] == '-') ++end;
  if (end < text.size() && text[end] == '$') ++end;
  while (end < text.size() && in_number(text[end])) ++end;
  return text.substr(begin, end - begin);
}

std::string_view last_characters(std::string_view text) {
  return text.size() > kEnd ? text.substr(text.size() - kEnd) : text;
}

// A decimal as sign, digits before the point without leading zeros, digits after it without trailing ones.
struct Decimal {
  bool negative = false;
  std::string whole, fraction;
  bool operator==(const Decimal&) const = default;
};

std::optional<Decimal> decimal_of(std::string_view text) {
  Decimal d;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    d.negative = text[0] == '-';
    text.remove_prefix(1);
  }
  const auto point = text.find('.');
  d.whole = text.substr(0, point);
  if (point != std::string_view::npos) d.fraction = text.substr(point + 1);
  if (d.whole.empty() && d.fraction.empty()) return std::nullopt;
  if (!std::ranges::all_of(d.whole, is_digit) || !std::ranges::all_of(d.fraction, is_digit)) return std::nullopt;
  d.whole.erase(0, std::min(d.whole.find_first_not_of('0'), d.whole.size()));
  d.fraction.erase(d.fraction.find_last_not_of('0') + 1);
  if (d.whole.empty() && d.fraction.empty()) d.negative = false;
  return d;
}

// Exact where it fits: at most 18 digits.
struct Rational {
  __int128 numerator, denominator;  // the latter above 0
};

std::optional<Rational> rational_of_decimal(std::string_view text) {
  const auto d = decimal_of(text);
  if (!d || d->whole.size() + d->fraction.size() > 18) return std::nullopt;
  Rational r{0, 1};
  for (const auto c : d->whole + d->fraction) r.numerator = r.numerator * 10 + (c - '0');
  for (std::size_t i = 0; i < d->fraction.size(); ++i) r.denominator *= 10;
  if (d->negative) r.numerator = -r.numerator;
  return r;
}

// The text inside the braces that open at `open`, or nothing where they do not balance.
std::optional<std::string_view> braced(std::string_view text, std::size_t open) {
  int depth = 0;
  for (auto i = open; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return text.substr(open + 1, i - open - 1);
  }
  return std::nullopt;
}

// a, a.b, a/b, \frac{a}{b}, with a sign.
std::optional<Rational> rational_of(std::string_view text) {
  bool negative = false;
  if (text.starts_with('-') && text.substr(1).starts_with("\\frac")) {
    negative = true;
    text.remove_prefix(1);
  }
  std::string_view above = text, below = "1";
  if (text.starts_with("\\frac{")) {
    const auto first = braced(text, 5);
    if (!first) return std::nullopt;
    const auto open = 5 + first->size() + 2;
    const auto second = open < text.size() && text[open] == '{' ? braced(text, open) : std::nullopt;
    if (!second || open + second->size() + 2 != text.size()) return std::nullopt;
    above = *first;
    below = *second;
  } else if (const auto slash = text.find('/'); slash != std::string_view::npos) {
    above = text.substr(0, slash);
    below = text.substr(slash + 1);
  }
  const auto a = rational_of_decimal(above), b = rational_of_decimal(below);
  if (!a || !b || b->numerator == 0) return std::nullopt;
  // a and b below 10^18: the products below stay in 128 bits.
  Rational r{a->numerator * b->denominator, a->denominator * b->numerator};
  if (r.denominator < 0) r = {-r.numerator, -r.denominator};
  if (negative) r.numerator = -r.numerator;
  return r;
}

bool equal_rationals(Rational a, Rational b) {
  const auto reduce = [](Rational& r) {
    __int128 x = r.numerator < 0 ? -r.numerator : r.numerator, y = r.denominator;
    while (y != 0) x = std::exchange(y, x % y);
    r = {r.numerator / x, r.denominator / x};
  };
  reduce(a);
  reduce(b);
  return a.numerator == b.numerator && a.denominator == b.denominator;
}

// \text{x}, \mathrm{x}, \textbf{x}, \mbox{x} to x; a unit behind a value, "5\text{ cm}", goes altogether.
void unwrap_text(std::string& text) {
  static constexpr std::array<std::string_view, 5> kWrappers = {"\\text{", "\\textbf{", "\\mathrm{", "\\mbox{",
                                                                "\\mathbf{"};
  for (const auto wrapper : kWrappers) {
    for (auto at = text.find(wrapper); at != std::string::npos; at = text.find(wrapper, at)) {
      const auto inside = braced(text, at + wrapper.size() - 1);
      if (!inside) break;
      const auto length = wrapper.size() + inside->size() + 1;
      const bool unit = at > 0 && inside->starts_with(' ');
      text.replace(at, length, unit ? std::string() : std::string(trim(*inside)));
    }
  }
}

// "\sqrt3" to "\sqrt{3}", "\frac12" to "\frac{1}{2}", "\frac1{72}" to "\frac{1}{72}".
void add_braces(std::string& text) {
  const auto brace_next = [&](std::size_t at) {  // the place behind the argument
    if (at >= text.size()) return at;
    if (text[at] == '{') {
      const auto inside = braced(text, at);
      return inside ? at + inside->size() + 2 : text.size();
    }
    if (text[at] == '\\') return text.size();  // an argument that is a command stays as it is
    text.insert(at + 1, "}");
    text.insert(at, "{");
    return at + 3;
  };
  for (auto at = text.find("\\sqrt"); at != std::string::npos; at = text.find("\\sqrt", at + 5)) {
    if (at + 5 < text.size() && text[at + 5] != '[') brace_next(at + 5);
  }
  for (auto at = text.find("\\frac"); at != std::string::npos; at = text.find("\\frac", at + 5)) {
    brace_next(brace_next(at + 5));
  }
}

// "12,345,678" is one number, "1,2" are two.
bool has_thousands(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  text = text.substr(0, text.find('.'));
  const auto first = text.find(',');
  if (first == std::string_view::npos || first == 0 || first > 3) return false;
  for (std::size_t i = first; i < text.size(); i += 4) {
    if (text[i] != ',' || i + 4 > text.size() || !std::all_of(text.begin() + i + 1, text.begin() + i + 4, is_digit))
      return false;
  }
  return std::all_of(text.begin(), text.begin() + first, is_digit);
}

std::string clean_math(std::string_view written) {
  std::string text(trim(written));
  unwrap_text(text);
  for (const auto* gone : {"\n", "\\!", "\\,", "\\;", "\\:", "\\ ", "\\left", "\\right", "^{\\circ}", "^\\circ",
                           "\\degree", "\\$", "$", "\\%", "%", " "}) {
    erase_all(text, gone);
  }
  replace_all(text, "tfrac", "frac");
  replace_all(text, "dfrac", "frac");
  replace_all(text, "\\{", "{");
  replace_all(text, "\\}", "}");
  if (const auto equals = text.find('='); equals <= 2) text.erase(0, equals + 1);
  add_braces(text);
  if (text.ends_with('.')) text.pop_back();
  if (has_thousands(text)) erase_all(text, ",");
  return text;
}

// The elements of "(a,b)", "[a,b)", "{a,b}" or "a,b" at the top level; one for anything else.
std::vector<std::string_view> elements(std::string_view text) {
  std::vector<std::string_view> found;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '[' || text[i] == '{') ++depth;
    if (text[i] == ')' || text[i] == ']' || text[i] == '}') --depth;
    if (text[i] == ',' && depth == 0) {
      found.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  found.push_back(text.substr(begin));
  return found;
}

bool is_bracketed(std::string_view text) {
  return text.size() >= 2 && std::string_view("([{").find(text.front()) != std::string_view::npos &&
         std::string_view(")]}").find(text.back()) != std::string_view::npos;
}

bool equal_clean(std::string_view a, std::string_view b, int depth = 0) {
  if (a == b) return true;
  if (const auto x = rational_of(a), y = rational_of(b); x && y) return equal_rationals(*x, *y);
  if (depth > 4) return false;
  if (is_bracketed(a) && is_bracketed(b)) {
    return a.front() == b.front() && a.back() == b.back() &&
           equal_clean(a.substr(1, a.size() - 2), b.substr(1, b.size() - 2), depth + 1);
  }
  const auto left = elements(a), right = elements(b);
  return left.size() > 1 && std::ranges::equal(left, right, [&](std::string_view x, std::string_view y) {
           return equal_clean(x, y, depth + 1);
         });
}

}  // namespace

std::optional<std::string> gsm8k_gold(std::string_view answer) {
  const auto mark = answer.rfind("####");
  return clean_number(mark == std::string_view::npos ? answer : answer.substr(mark + 4));
}

std::optional<std::string> gsm8k_strict(std::string_view response) {
  const auto end = last_characters(response);
  for (auto at = end.rfind("#### "); at != std::string_view::npos; at = at == 0 ? at : end.rfind("#### ", at - 1)) {
    if (auto number = clean_number(number_at(end, at + 5))) return number;
    if (at == 0) break;
  }
  return std::nullopt;
}

std::optional<std::string> gsm8k_flexible(std::string_view response) {
  const auto end = last_characters(response);
  for (auto last = end.find_last_of("0123456789"); last != std::string_view::npos;) {
    auto begin = last;
    while (begin > 0 && in_number(end[begin - 1])) --begin;
    if (begin > 0 && end[begin - 1] == '$') --begin;
    if (begin > 0 && end[begin - 1] == '-') --begin;
    if (auto number = clean_number(number_at(end, begin))) return number;
    last = begin == 0 ? std::string_view::npos : end.find_last_of("0123456789", begin - 1);
  }
  return std::nullopt;
}

bool equal_decimals(std::string_view a, std::string_view b) {
  const auto x = decimal_of(a), y = decimal_of(b);
  return x && y && *x == *y;
}

std::optional<std::string> boxed_answer(std::string_view text) {
  const auto last_of = [&](std::string_view command) -> std::optional<std::pair<std::size_t, std::string_view>> {
    for (auto at = text.rfind(command); at != std::string_view::npos; at = text.rfind(command, at - 1)) {
      if (const auto inside = braced(text, at + command.size() - 1)) return std::pair(at, *inside);
      if (at == 0) break;
    }
    return std::nullopt;
  };
  const auto boxed = last_of("\\boxed{"), framed = last_of("\\fbox{");
  if (!boxed && !framed) return std::nullopt;
  const bool take_boxed = boxed && (!framed || boxed->first > framed->first);
  return std::string(take_boxed ? boxed->second : framed->second);
}

bool equal_math(std::string_view a, std::string_view b) { return equal_clean(clean_math(a), clean_math(b)); }

}  // namespace sluice
