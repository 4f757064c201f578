// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sluice::jinja {
namespace {

void check_storable(const Value& element) {
  if (element.space() || element.callable())
    throw Problem(fmt::format("{} cannot be stored in a container", element.type()));
}

// A List or Dict takes an element, whose key has `key_bytes`.
template <typename Container>
void grow(Container& container, const Value& element, std::size_t key_bytes = 0) {
  check_storable(element);
  container.depth = std::max(container.depth, 1 + element.depth());
  if (container.depth > kMaxDepth) throw Problem(fmt::format("values nested more than {} deep", kMaxDepth));
  container.weight += element.weight() + static_cast<std::int64_t>(key_bytes);
  if (container.weight > kMaxWeight) throw Problem(fmt::format("a value of more than {} bytes", kMaxWeight));
}

}  // namespace

Value::Value(List list) : storage_(std::make_shared<const List>(std::move(list))) {}
Value::Value(Dict dict) : storage_(std::make_shared<const Dict>(std::move(dict))) {}

List::List(std::vector<Value> values) : elements(std::move(values)) {
  for (const auto& element : elements) grow(*this, element);
}

void Dict::set(Text key, Value value) {
  grow(*this, value, key.size());
  const auto [place, added] = index.try_emplace(key.str(), entries.size());
  if (added) {
    entries.emplace_back(std::move(key), std::move(value));
  } else {
    entries[place->second].second = std::move(value);
  }
}

const Value* Dict::find(const std::string& key) const {
  const auto place = index.find(key);
  return place == index.end() ? nullptr : &entries[place->second].second;
}

void Namespace::set(const std::string& key, Value value) {
  check_storable(value);
  attributes[key] = std::move(value);
}

bool Value::is_number() const { return as<bool>() || as<std::int64_t>() || as<double>(); }

double Value::number() const {
  if (const auto* boolean = as<bool>()) return *boolean ? 1.0 : 0.0;
  if (const auto* integer = as<std::int64_t>()) return static_cast<double>(*integer);
  return *as<double>();
}

const char* Value::type() const {
  static constexpr const char* kNames[] = {"an undefined value", "none",   "a boolean", "an integer",  "a number",
                                           "a string",           "a list", "a mapping", "a namespace", "a function"};
  return kNames[storage_.index()];
}

int Value::depth() const {
  if (const auto* l = list()) return l->depth;
  if (const auto* d = dict()) return d->depth;
  return 0;
}

std::int64_t Value::weight() const {
  if (const auto* l = list()) return l->weight;
  if (const auto* d = dict()) return d->weight;
  if (const auto* t = text()) return 1 + static_cast<std::int64_t>(t->size());
  return 1;
}

bool is_true(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (value.is_number()) return value.number() != 0.0;
  if (const auto* text = value.text()) return !text->empty();
  if (const auto* list = value.list()) return !list->elements.empty();
  if (const auto* dict = value.dict()) return !dict->entries.empty();
  return true;
}

bool equal(const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    const auto* a = left.as<std::int64_t>();
    const auto* b = right.as<std::int64_t>();
    return a && b ? *a == *b : left.number() == right.number();
  }
  if (left.text() && right.text()) return left.text()->str() == right.text()->str();
  if (left.list() && right.list()) {
    return std::equal(left.list()->elements.begin(), left.list()->elements.end(), right.list()->elements.begin(),
                      right.list()->elements.end(), equal);
  }
  if (left.dict() && right.dict()) {
    if (left.dict()->entries.size() != right.dict()->entries.size()) return false;
    return std::all_of(left.dict()->entries.begin(), left.dict()->entries.end(), [&](const auto& entry) {
      const auto* other = right.dict()->find(entry.first.str());
      return other && equal(entry.second, *other);
    });
  }
  if (left.space() || right.space()) return left.space() == right.space();
  if (left.callable() || right.callable()) return left.callable() == right.callable();
  return (left.is_none() && right.is_none()) || (left.is_undefined() && right.is_undefined());
}

bool less(const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    const auto* a = left.as<std::int64_t>();
    const auto* b = right.as<std::int64_t>();
    return a && b ? *a < *b : left.number() < right.number();
  }
  if (left.text() && right.text()) return left.text()->str() < right.text()->str();  // UTF-8 sorts as its code points
  throw Problem(fmt::format("cannot order {} and {}", left.type(), right.type()));
}

bool contains(const Value& container, const Value& element) {
  if (const auto* text = container.text()) {
    if (!element.text()) throw Problem(fmt::format("'in' a string needs a string on its left, got {}", element.type()));
    return text->str().find(element.text()->str()) != std::string::npos;
  }
  if (const auto* list = container.list()) {
    return std::any_of(list->elements.begin(), list->elements.end(),
                       [&](const Value& one) { return equal(one, element); });
  }
  if (const auto* dict = container.dict()) return element.text() && dict->find(element.text()->str());
  if (container.is_undefined()) return false;
  throw Problem(fmt::format("'in' needs a string, list or mapping on its right, got {}", container.type()));
}

std::vector<Value> iterate(const Value& value) {
  std::vector<Value> elements;
  if (const auto* list = value.list()) return list->elements;
  if (const auto* dict = value.dict()) {
    for (const auto& entry : dict->entries) elements.emplace_back(entry.first);
  } else if (const auto* text = value.text()) {
    const auto starts = code_point_starts(text->str());
    for (std::size_t i = 0; i + 1 < starts.size(); ++i)
      elements.emplace_back(text->substr(starts[i], starts[i + 1] - starts[i]));
  } else if (!value.is_undefined()) {
    throw Problem(fmt::format("cannot iterate over {}", value.type()));
  }
  return elements;
}

// The shortest digits that read back the same, in Python's notation: always with a point or an exponent.
std::string number_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  auto text = fmt::format("{}", number);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

namespace {

void append_repr(Text& out, const Value& value);

void append_str(Text& out, const Value& value) {
  if (value.text()) {
    out.append(*value.text());
  } else {
    append_repr(out, value);
  }
}

Text quoted(const Text& text) {
  const auto& bytes = text.str();
  const char quote = bytes.find('\'') != std::string::npos && bytes.find('"') == std::string::npos ? '"' : '\'';
  Text out(std::string_view(&quote, 1), Origin::kTemplate);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const char c = bytes[i];
    const auto origin = text.origin(i);
    if (c == '\\' || c == quote) {
      out.append("\\", origin);
      out.append(std::string_view(&c, 1), origin);
    } else if (c == '\n' || c == '\t' || c == '\r') {
      out.append(c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\r", origin);
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out.append(fmt::format("\\x{:02x}", static_cast<unsigned char>(c)), origin);
    } else {
      out.append(std::string_view(&c, 1), origin);
    }
  }
  out.append(std::string_view(&quote, 1), Origin::kTemplate);
  return out;
}

void append_repr(Text& out, const Value& value) {
  if (const auto* text = value.text()) {
    out.append(quoted(*text));
  } else if (const auto* list = value.list()) {
    out.append("[", Origin::kTemplate);
    for (std::size_t i = 0; i < list->elements.size(); ++i) {
      if (i > 0) out.append(", ", Origin::kTemplate);
      append_repr(out, list->elements[i]);
    }
    out.append("]", Origin::kTemplate);
  } else if (const auto* dict = value.dict()) {
    out.append("{", Origin::kTemplate);
    for (std::size_t i = 0; i < dict->entries.size(); ++i) {
      if (i > 0) out.append(", ", Origin::kTemplate);
      out.append(quoted(dict->entries[i].first));
      out.append(": ", Origin::kTemplate);
      append_repr(out, dict->entries[i].second);
    }
    out.append("}", Origin::kTemplate);
  } else if (value.is_none()) {
    out.append("None", Origin::kTemplate);
  } else if (const auto* boolean = value.as<bool>()) {
    out.append(*boolean ? "True" : "False", Origin::kTemplate);
  } else if (const auto* integer = value.as<std::int64_t>()) {
    out.append(fmt::format("{}", *integer), Origin::kData);
  } else if (const auto* number = value.as<double>()) {
    out.append(number_text(*number), Origin::kData);
  } else if (!value.is_undefined()) {
    throw Problem(fmt::format("{} cannot be printed", value.type()));
  }
}

void append_json_string(std::string& out, const std::string& text, bool ascii) {
  out += '"';
  for (std::size_t i = 0; i < text.size(); i += code_point_size(text[i])) {
    const char c = text[i];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\b') {
      out += "\\b";
    } else if (c == '\f') {
      out += "\\f";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else if (ascii && static_cast<unsigned char>(c) >= 0x7F) {
      auto point = static_cast<std::uint32_t>(code_point_at(text, i));
      if (point < 0x10000) {
        out += fmt::format("\\u{:04x}", point);
      } else {
        point -= 0x10000;
        out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (point >> 10), 0xDC00 + (point & 0x3FF));
      }
    } else {
      out += text.substr(i, code_point_size(c));
    }
  }
  out += '"';
}

void append_json(std::string& out, const Value& value, const JsonStyle& style, int level) {
  const auto new_line = [&](int at_level) {
    if (style.indent >= 0) out += '\n' + std::string(static_cast<std::size_t>(style.indent * at_level), ' ');
  };
  if (const auto* text = value.text()) {
    append_json_string(out, text->str(), style.ascii);
  } else if (const auto* list = value.list()) {
    out += '[';
    for (std::size_t i = 0; i < list->elements.size(); ++i) {
      if (i > 0) out += style.item_separator;
      new_line(level + 1);
      append_json(out, list->elements[i], style, level + 1);
    }
    if (!list->elements.empty()) new_line(level);
    out += ']';
  } else if (const auto* dict = value.dict()) {
    std::vector<const std::pair<Text, Value>*> entries;
    for (const auto& entry : dict->entries) entries.push_back(&entry);
    if (style.sort_keys) {
      std::sort(entries.begin(), entries.end(), [](auto* a, auto* b) { return a->first.str() < b->first.str(); });
    }
    out += '{';
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out += style.item_separator;
      new_line(level + 1);
      append_json_string(out, entries[i]->first.str(), style.ascii);
      out += style.key_separator;
      append_json(out, entries[i]->second, style, level + 1);
    }
    if (!entries.empty()) new_line(level);
    out += '}';
  } else if (value.is_none()) {
    out += "null";
  } else if (const auto* boolean = value.as<bool>()) {
    out += *boolean ? "true" : "false";
  } else if (const auto* integer = value.as<std::int64_t>()) {
    out += fmt::format("{}", *integer);
  } else if (const auto* number = value.as<double>()) {
    out += std::isnan(*number)   ? "NaN"
           : std::isinf(*number) ? (*number > 0 ? "Infinity" : "-Infinity")
                                 : number_text(*number);
  } else {
    throw Problem(fmt::format("{} cannot be written as JSON", value.type()));
  }
}

Value convert(const nlohmann::ordered_json& json, int level) {
  if (level > kMaxDepth) throw Problem(fmt::format("values nested more than {} deep", kMaxDepth));
  if (json.is_object()) {
    Dict dict;
    for (const auto& [key, value] : json.items()) dict.set(Text(key, Origin::kData), convert(value, level + 1));
    return dict;
  }
  if (json.is_array()) {
    std::vector<Value> elements;
    for (const auto& element : json) elements.push_back(convert(element, level + 1));
    return List(std::move(elements));
  }
  if (json.is_string()) return Text(json.get_ref<const std::string&>(), Origin::kData);
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned() &&
      json.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) {
    throw Problem(fmt::format("the integer {} does not fit into 64 bits", json.get<std::uint64_t>()));
  }
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number()) return json.get<double>();
  return None{};
}

}  // namespace

Text to_text(const Value& value) {
  Text out;
  append_str(out, value);
  return out;
}

std::string to_json(const Value& value, const JsonStyle& style) {
  std::string out;
  append_json(out, value, style, 0);
  return out;
}

Value from_json(const nlohmann::ordered_json& json) { return convert(json, 1); }

}  // namespace sluice::jinja
