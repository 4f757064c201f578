// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "sluice/data/jinja/builtins.h"
#include "sluice/data/utf8.h"

namespace sluice::jinja {

Text strip(const Text& text, const Text* characters, bool left, bool right) {
  const auto& bytes = text.str();
  const auto goes = [&](std::size_t begin, std::size_t end) {
    if (!characters) return is_space(code_point_at(bytes, begin));
    const auto one = bytes.substr(begin, end - begin);
    return characters->str().find(one) != std::string::npos;  // UTF-8: a whole character matches at its start only
  };
  std::size_t begin = 0;
  std::size_t end = bytes.size();
  while (left && begin < end) {
    const auto next = begin + code_point_size(bytes[begin]);
    if (!goes(begin, next)) break;
    begin = next;
  }
  while (right && end > begin) {
    auto previous = end - 1;
    while ((static_cast<unsigned char>(bytes[previous]) & 0xC0) == 0x80) --previous;
    if (!goes(previous, end)) break;
    end = previous;
  }
  return text.substr(begin, end - begin);
}

Text replace(Interpreter& interpreter, const Text& text, const Text& from, const Text& to, std::int64_t count) {
  if (from.empty()) throw Problem("replace: the text to replace is empty");
  Text out;
  std::size_t begin = 0;
  while (count != 0) {
    const auto at = text.str().find(from.str(), begin);
    if (at == std::string::npos) break;
    interpreter.charge_bytes(at - begin + to.size());
    out.append(text.substr(begin, at - begin));
    out.append(to);
    begin = at + from.size();
    --count;
  }
  interpreter.charge_bytes(text.size() - begin);
  out.append(text.substr(begin));
  return out;
}

Text change_case(const Text& text, bool upper) {
  Text out;
  for (std::size_t at = 0; at < text.size(); at += code_point_size(text.str()[at])) {
    const auto point = static_cast<utf8proc_int32_t>(code_point_at(text.str(), at));
    std::string changed;
    if (upper && point == 0xDF) {
      changed = "SS";  // the one character in use whose upper case is two
    } else {
      append_utf8(changed, static_cast<char32_t>(upper ? utf8proc_toupper(point) : utf8proc_tolower(point)));
    }
    out.append(changed, text.origin(at));
  }
  return out;
}

Text capitalize(const Text& text) {
  if (text.empty()) return text;
  const auto first = code_point_size(text.str()[0]);
  auto out = change_case(text.substr(0, first), true);
  out.append(change_case(text.substr(first), false));
  return out;
}

Text join(Interpreter& interpreter, const std::vector<Value>& elements, const Text& separator) {
  Text out;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const auto piece = to_text(elements[i]);
    interpreter.charge_bytes(piece.size() + separator.size());
    if (i > 0) out.append(separator);
    out.append(piece);
  }
  return out;
}

namespace {

// One call of a filter.
struct Call {
  Interpreter& interpreter;
  const std::string& name;
  const Value& input;
  const Arguments& arguments;
  ArgumentReader reader{fmt::format("filter '{}'", name), arguments};

  Value finish(Value value) const {
    reader.done();
    return value;
  }
  Text text() const {  // as Jinja's string filters take it
    auto result = to_text(input);
    interpreter.charge_bytes(result.size());
    return result;
  }
  std::vector<Value> elements() const {
    auto result = iterate(input);
    interpreter.charge_steps(static_cast<std::int64_t>(result.size()));
    return result;
  }
};

// "a.b.0" of a value.
Value path(Value value, const Value& where) {
  if (where.as<std::int64_t>()) return element(value, where);
  if (!where.text()) throw Problem(fmt::format("an attribute's name must be a string, got {}", where.type()));
  const auto& names = where.text()->str();
  for (std::size_t begin = 0; begin <= names.size();) {
    const auto end = std::min(names.find('.', begin), names.size());
    const auto name = names.substr(begin, end - begin);
    std::int64_t index = 0;
    const bool is_index = !name.empty() && std::from_chars(name.data(), name.data() + name.size(), index).ptr ==
                                               name.data() + name.size();
    value = is_index ? element(value, index) : element(value, Text(name, Origin::kTemplate));
    begin = end + 1;
  }
  return value;
}

Value length(Call& call) {
  const auto& value = call.input;
  if (const auto* text = value.text()) {
    call.interpreter.charge_steps(static_cast<std::int64_t>(text->size()) / 64);
    return call.finish(static_cast<std::int64_t>(count_code_points(text->str())));
  }
  if (const auto* list = value.list()) return call.finish(static_cast<std::int64_t>(list->elements.size()));
  if (const auto* dict = value.dict()) return call.finish(static_cast<std::int64_t>(dict->entries.size()));
  if (value.is_undefined()) return call.finish(std::int64_t{0});
  throw Problem(fmt::format("filter '{}': {} has no length", call.name, value.type()));
}

Value json(Call& call) {
  JsonStyle style;
  style.ascii = call.reader.boolean("ensure_ascii", false);
  style.indent = static_cast<int>(std::clamp<std::int64_t>(call.reader.integer("indent", -1), -1, 16));
  if (style.indent >= 0) style.item_separator = ',';
  if (const auto* separators = call.reader.next("separators"); separators && !separators->is_none()) {
    const auto* pair = separators->list();
    if (!pair || pair->elements.size() != 2 || !pair->elements[0].text() || !pair->elements[1].text()) {
      throw Problem("filter 'tojson': separators must be two strings");
    }
    style.item_separator = pair->elements[0].text()->str();
    style.key_separator = pair->elements[1].text()->str();
  }
  style.sort_keys = call.reader.boolean("sort_keys", false);
  auto text = to_json(call.input, style);
  call.interpreter.charge_bytes(text.size());
  return call.finish(Text(text, Origin::kData));
}

Value join_filter(Call& call) {
  const auto* separator = call.reader.next("d");
  const auto* attribute = call.reader.next("attribute");
  auto elements = call.elements();
  if (attribute && !attribute->is_none()) {
    for (auto& one : elements) one = path(one, *attribute);
  }
  return call.finish(join(call.interpreter, elements, separator ? to_text(*separator) : Text()));
}

Value items(Call& call) {
  if (call.input.is_undefined()) return call.finish(List());
  const auto* dict = call.input.dict();
  if (!dict) {
    throw Problem(fmt::format("filter 'items' needs a mapping, got {}{}", call.input.type(),
                              call.input.text() ? " (arguments of a tool call given as a string?)" : ""));
  }
  std::vector<Value> pairs;
  call.interpreter.charge_steps(static_cast<std::int64_t>(dict->entries.size()));
  for (const auto& [key, value] : dict->entries) pairs.emplace_back(List({key, value}));
  return call.finish(List(std::move(pairs)));
}

Value to_number(Call& call) {
  const bool integer = call.name == "int";
  const auto* otherwise = call.reader.next("default");
  const auto fallback = otherwise ? *otherwise : integer ? Value(std::int64_t{0}) : Value(0.0);
  double number = 0;
  if (const auto* given = call.input.as<std::int64_t>(); given && integer) return call.finish(*given);
  if (call.input.is_number()) {
    number = call.input.number();
  } else if (const auto* text = call.input.text()) {
    const auto trimmed = strip(*text, nullptr, true, true).str();
    const auto* begin = trimmed.data() + (trimmed.starts_with('+') ? 1 : 0);
    const auto* end = trimmed.data() + trimmed.size();
    std::int64_t exact = 0;
    if (const auto [stop, error] = std::from_chars(begin, end, exact); integer && error == std::errc() && stop == end)
      return call.finish(exact);
    const auto [stop, error] = std::from_chars(begin, end, number);
    if (begin == end || error != std::errc() || stop != end) return call.finish(fallback);
  } else {
    return call.finish(fallback);
  }
  if (!integer) return call.finish(number);
  if (!(std::abs(number) < 9.2e18)) return call.finish(fallback);
  return call.finish(static_cast<std::int64_t>(number));
}

// select, reject, selectattr, rejectattr.
Value select(Call& call) {
  const bool by_attribute = call.name.ends_with("attr");
  const bool keep = call.name.starts_with("select");
  const Value* attribute = by_attribute ? &call.reader.required("attribute") : nullptr;
  const auto* test = call.reader.next("test");
  Arguments rest;
  const std::size_t taken = (by_attribute ? 1 : 0) + (test ? 1 : 0);
  rest.positional.assign(call.arguments.positional.begin() + static_cast<std::ptrdiff_t>(taken),
                         call.arguments.positional.end());
  if (test && !test->text()) throw Problem(fmt::format("filter '{}': the test's name must be a string", call.name));
  std::vector<Value> kept;
  for (auto& one : call.elements()) {
    const auto value = by_attribute ? path(one, *attribute) : one;
    if (test) call.interpreter.charge_comparison(value);
    if ((test ? call_test(test->text()->str(), value, rest) : is_true(value)) == keep) kept.push_back(one);
  }
  return List(std::move(kept));
}

Value map(Call& call) {
  auto elements = call.elements();
  if (call.arguments.positional.empty()) {
    const auto& attribute = call.reader.required("attribute");
    const auto* otherwise = call.reader.next("default");
    for (auto& one : elements) {
      one = path(one, attribute);
      if (one.is_undefined() && otherwise) one = *otherwise;
    }
    return call.finish(List(std::move(elements)));
  }
  const auto filter = call.reader.text("filter").str();
  const Arguments rest{{call.arguments.positional.begin() + 1, call.arguments.positional.end()}, call.arguments.named};
  for (auto& one : elements) one = call_filter(call.interpreter, filter, one, rest);
  return List(std::move(elements));
}

// Strings are compared without regard to case unless asked, as Jinja does.
Value sort_key(const Value& value, bool case_sensitive) {
  return value.text() && !case_sensitive ? Value(change_case(*value.text(), false)) : value;
}

Value sort(Call& call) {
  const bool is_dict = call.name == "dictsort";
  bool reverse = !is_dict && call.reader.boolean("reverse", false);
  const bool case_sensitive = call.reader.boolean("case_sensitive", false);
  const Value* attribute = nullptr;
  bool by_value = false;
  if (is_dict) {
    const auto* by = call.reader.next("by");
    by_value = by && by->text() && by->text()->str() == "value";
    reverse = call.reader.boolean("reverse", false);
  } else {
    attribute = call.reader.next("attribute");
  }
  call.reader.done();
  if (is_dict && !call.input.dict())
    throw Problem(fmt::format("filter 'dictsort' needs a mapping, got {}", call.input.type()));
  std::vector<std::pair<Value, Value>> keyed;
  if (is_dict) {
    for (const auto& [key, value] : call.input.dict()->entries) {
      keyed.emplace_back(sort_key(by_value ? value : Value(key), case_sensitive), List({key, value}));
    }
  } else {
    for (const auto& one : call.elements()) {
      keyed.emplace_back(sort_key(attribute && !attribute->is_none() ? path(one, *attribute) : one, case_sensitive),
                         one);
    }
  }
  call.interpreter.charge_steps(static_cast<std::int64_t>(keyed.size()) * 20);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? less(b.first, a.first) : less(a.first, b.first);
  });
  std::vector<Value> sorted;
  for (auto& one : keyed) sorted.push_back(std::move(one.second));
  return List(std::move(sorted));
}

Value unique(Call& call) {
  const bool case_sensitive = call.reader.boolean("case_sensitive", false);
  std::vector<Value> kept;
  for (auto& one : call.elements()) {
    const auto key = sort_key(one, case_sensitive);
    call.interpreter.charge_steps(static_cast<std::int64_t>(kept.size()) * (1 + key.weight() / 64));
    const bool seen = std::any_of(kept.begin(), kept.end(),
                                  [&](const Value& other) { return equal(sort_key(other, case_sensitive), key); });
    if (!seen) kept.push_back(one);
  }
  return call.finish(List(std::move(kept)));
}

Value reverse(Call& call) {
  auto elements = call.elements();
  std::reverse(elements.begin(), elements.end());
  if (call.input.text()) return call.finish(join(call.interpreter, elements, {}));
  return call.finish(List(std::move(elements)));
}

Value indent(Call& call) {
  const auto* width = call.reader.next("width");
  const bool first = call.reader.boolean("first", false);
  const bool blank = call.reader.boolean("blank", false);
  Text margin(std::string(4, ' '), Origin::kTemplate);
  if (width && width->text()) {
    margin = *width->text();
  } else if (width) {
    const auto* count = width->as<std::int64_t>();
    if (!count || *count < 0 || *count > 1000) throw Problem("filter 'indent': the width must be 0 to 1000");
    margin = Text(std::string(static_cast<std::size_t>(*count), ' '), Origin::kTemplate);
  }
  const auto text = call.text();
  Text out = first ? margin : Text();
  for (std::size_t begin = 0; begin < text.size();) {
    const auto newline = text.str().find('\n', begin);
    const auto end = newline == std::string::npos ? text.size() : newline + 1;
    const bool is_blank = newline == begin;
    if (begin > 0 && (blank || !is_blank)) {
      call.interpreter.charge_bytes(margin.size());
      out.append(margin);
    }
    out.append(text.substr(begin, end - begin));
    begin = end;
  }
  return call.finish(std::move(out));
}

Value first_or_last(Call& call) {
  const auto elements = call.elements();
  if (elements.empty()) return call.finish(Undefined{call.name + " of nothing"});
  return call.finish(call.name == "first" ? elements.front() : elements.back());
}

Value default_filter(Call& call) {
  const auto* otherwise = call.reader.next("default_value");
  const bool any_false = call.reader.boolean("boolean", false);
  const bool missing = call.input.is_undefined() || (any_false && !is_true(call.input));
  return call.finish(!missing ? call.input : otherwise ? *otherwise : Value(Text()));
}

Value trim(Call& call) {
  const auto* characters = call.reader.next("chars");
  return call.finish(strip(call.text(), characters ? characters->text() : nullptr, true, true));
}

Value replace_filter(Call& call) {
  const auto from = to_text(call.reader.required("old"));
  const auto to = to_text(call.reader.required("new"));
  return call.finish(replace(call.interpreter, call.text(), from, to, call.reader.integer("count", -1)));
}

Value change_case_filter(Call& call) { return call.finish(change_case(call.text(), call.name == "upper")); }
Value capitalize_filter(Call& call) { return call.finish(capitalize(call.text())); }
Value list(Call& call) { return call.finish(List(call.elements())); }
Value string(Call& call) { return call.finish(call.text()); }
Value safe(Call& call) { return call.finish(call.input); }  // nothing is escaped, so there is nothing to exempt

}  // namespace

Value call_filter(Interpreter& interpreter, const std::string& name, const Value& input, const Arguments& arguments) {
  static const std::unordered_map<std::string, Value (*)(Call&)> kFilters = {{"length", length},
                                                                             {"count", length},
                                                                             {"tojson", json},
                                                                             {"join", join_filter},
                                                                             {"items", items},
                                                                             {"int", to_number},
                                                                             {"float", to_number},
                                                                             {"select", select},
                                                                             {"reject", select},
                                                                             {"selectattr", select},
                                                                             {"rejectattr", select},
                                                                             {"map", map},
                                                                             {"sort", sort},
                                                                             {"dictsort", sort},
                                                                             {"unique", unique},
                                                                             {"reverse", reverse},
                                                                             {"indent", indent},
                                                                             {"first", first_or_last},
                                                                             {"last", first_or_last},
                                                                             {"default", default_filter},
                                                                             {"d", default_filter},
                                                                             {"trim", trim},
                                                                             {"replace", replace_filter},
                                                                             {"upper", change_case_filter},
                                                                             {"lower", change_case_filter},
                                                                             {"capitalize", capitalize_filter},
                                                                             {"list", list},
                                                                             {"string", string},
                                                                             {"safe", safe}};
  const auto filter = kFilters.find(name);
  if (filter == kFilters.end()) throw Problem(fmt::format("the filter '{}' is unknown or not supported", name));
  Call call{interpreter, name, input, arguments};
  return filter->second(call);
}

}  // namespace sluice::jinja
