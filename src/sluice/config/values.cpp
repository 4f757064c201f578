// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "sluice/config/suggest.h"
#include "sluice/core/error.h"

namespace sluice {
namespace {

std::string_view one_of(ValueType type) {
  switch (type) {
    case ValueType::kBool:
      return "true or false";
    case ValueType::kInteger:
      return "an integer";
    case ValueType::kNumber:
      return "a number";
    case ValueType::kText:
      return "text";
    case ValueType::kPath:
      return "a path";
  }
  return "";
}

std::string_view many_of(ValueType type) {
  switch (type) {
    case ValueType::kBool:
      return "a list of true or false";
    case ValueType::kInteger:
      return "a list of integers";
    case ValueType::kNumber:
      return "a list of numbers";
    case ValueType::kText:
      return "a list of texts";
    case ValueType::kPath:
      return "a list of paths";
  }
  return "";
}

// A found value in an error message: text in quotes, numbers bare.
std::string found(const Scalar& scalar) { return to_toml(scalar); }

// Reads the whole of `text` as a T; false if it is none. Out of range is an error of its own.
template <typename T>
bool read_number(const Option& option, std::string_view text, std::string_view where, T& number) {
  const auto* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, number);
  if (error == std::errc::result_out_of_range && stop == end) {
    fail_usage("{}: expected {}, got {}, which does not fit into 64 bits", where, expected_value(option), text);
  }
  return error == std::errc() && stop == end;
}

// Text as typed; a value of the wrong type stays text, which check_type() then refuses.
Scalar parse_scalar(const Option& option, std::string_view text, std::string_view where) {
  if (option.type == ValueType::kBool && text == "true") return true;
  if (option.type == ValueType::kBool && text == "false") return false;
  std::int64_t integer = 0;
  if (option.type == ValueType::kInteger && read_number(option, text, where, integer)) return integer;
  double number = 0;
  if (option.type == ValueType::kNumber && read_number(option, text, where, number)) return number;
  return std::string(text);
}

Scalar check_type(const Option& option, Scalar scalar, std::string_view where) {
  const auto* integer = std::get_if<std::int64_t>(&scalar);
  if (option.type == ValueType::kNumber && integer != nullptr) scalar = static_cast<double>(*integer);
  const bool right = option.type == ValueType::kBool      ? std::holds_alternative<bool>(scalar)
                     : option.type == ValueType::kInteger ? std::holds_alternative<std::int64_t>(scalar)
                     : option.type == ValueType::kNumber  ? std::holds_alternative<double>(scalar)
                                                          : std::holds_alternative<std::string>(scalar);
  if (!right) fail_usage("{}: expected {}, got {}", where, expected_value(option), found(scalar));
  return scalar;
}

void check_range(const Option& option, const Scalar& scalar, std::string_view where) {
  if (option.type != ValueType::kInteger && option.type != ValueType::kNumber) return;
  const double number = option.type == ValueType::kInteger ? static_cast<double>(std::get<std::int64_t>(scalar))
                                                           : std::get<double>(scalar);
  if (!std::isfinite(number)) fail_usage("{}: expected a finite number, got {}", where, found(scalar));
  const auto [min, max] = std::pair(option.traits.min, option.traits.max);
  if (min && max && (number < *min || number > *max)) {
    fail_usage("{}: must be between {} and {}, got {}", where, *min, *max, found(scalar));
  }
  if (min && number < *min) fail_usage("{}: must be at least {}, got {}", where, *min, found(scalar));
  if (max && number > *max) fail_usage("{}: must be at most {}, got {}", where, *max, found(scalar));
}

void check_choice(const Option& option, const Scalar& scalar, std::string_view where) {
  const auto& choices = option.traits.choices;
  if (choices.empty()) return;
  const auto& text = std::get<std::string>(scalar);
  if (std::find(choices.begin(), choices.end(), text) != choices.end()) return;
  const auto near = nearest(text, choices);
  fail_usage("{}: expected {}; got {}{}", where, expected_value(option), found(scalar),
             near.empty() ? "" : fmt::format("; did you mean {}?", near));
}

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += fmt::format("\\{}", c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (code < 0x20 || code == 0x7f) {
      out += fmt::format("\\u{:04x}", code);
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string number_text(double number) {
  auto text = fmt::format("{}", number);
  if (text.find_first_of(".enai") == std::string::npos) text += ".0";  // a TOML number, not an integer
  return text;
}

}  // namespace

std::string expected_value(const Option& option) {
  const bool many = option.count == ValueCount::kMany;
  std::string text(many ? many_of(option.type) : one_of(option.type));
  if (!option.traits.choices.empty()) {
    text = fmt::format("{} {}", many ? "a list of" : "one of", fmt::join(option.traits.choices, ", "));
  }
  return option.count == ValueCount::kOptional ? text + " or none" : text;
}

std::string value_placeholder(const Option& option) {
  std::string text;
  switch (option.type) {
    case ValueType::kBool:
      text = "true|false";
      break;
    case ValueType::kInteger:
      text = "N";
      break;
    case ValueType::kNumber:
      text = "NUMBER";
      break;
    case ValueType::kText:
      text = "TEXT";
      break;
    case ValueType::kPath:
      text = "PATH";
      break;
  }
  if (!option.traits.choices.empty()) text = fmt::format("{}", fmt::join(option.traits.choices, "|"));
  return option.count == ValueCount::kMany && !option.traits.repeated ? text + ",..." : text;
}

std::string flag_of(const Option& option) {
  auto name = option.name;
  if (!option.traits.saved) std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

Scalars parse_values(const Option& option, std::string_view text, std::string_view where) {
  if (option.count == ValueCount::kOptional && text == "none") return {};
  if (option.count != ValueCount::kMany) return {parse_scalar(option, text, where)};
  Scalars values;
  while (!text.empty()) {
    const auto comma = std::min(text.find(','), text.size());
    values.push_back(parse_scalar(option, text.substr(0, comma), where));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return values;
}

void set_option(const Option& option, Scalars values, std::string_view where) {
  for (auto& value : values) {
    value = check_type(option, std::move(value), where);
    check_range(option, value, where);
    check_choice(option, value, where);
  }
  option.set(values);
}

std::string to_toml(const Scalar& scalar) {
  if (const auto* text = std::get_if<std::string>(&scalar)) return toml_string(*text);
  if (const auto* number = std::get_if<double>(&scalar)) return number_text(*number);
  if (const auto* integer = std::get_if<std::int64_t>(&scalar)) return fmt::format("{}", *integer);
  return std::get<bool>(scalar) ? "true" : "false";
}

std::string to_toml(const Option& option, const Scalars& values) {
  if (option.count != ValueCount::kMany) return values.empty() ? "\"none\"" : to_toml(values[0]);
  std::vector<std::string> texts;
  for (const auto& value : values) texts.push_back(to_toml(value));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}

std::string to_plain(const Option& option, const Scalars& values) {
  if (values.empty()) return option.count == ValueCount::kMany ? "[]" : "none";
  std::vector<std::string> texts;
  for (const auto& value : values) {
    const auto* text = std::get_if<std::string>(&value);
    const auto* number = std::get_if<double>(&value);
    texts.push_back(text != nullptr     ? (text->empty() ? "\"\"" : *text)
                    : number != nullptr ? fmt::format("{}", *number)
                                        : to_toml(value));
  }
  return fmt::format("{}", fmt::join(texts, ","));
}

}  // namespace sluice
