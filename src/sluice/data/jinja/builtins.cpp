// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/builtins.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ctime>
#include <unordered_map>

namespace sluice::jinja {

const Value* ArgumentReader::next(std::string_view name) {
  if (position_ < arguments_.positional.size()) return &arguments_.positional[position_++];
  for (const auto& [key, value] : arguments_.named) {
    if (key == name) {
      ++named_used_;
      return &value;
    }
  }
  return nullptr;
}

const Value& ArgumentReader::required(std::string_view name) {
  const auto* value = next(name);
  if (!value) throw Problem(fmt::format("{} needs the argument '{}'", callee_, name));
  return *value;
}

const Text& ArgumentReader::text(std::string_view name) {
  const auto& value = required(name);
  if (!value.text()) throw Problem(fmt::format("{}: '{}' must be a string, got {}", callee_, name, value.type()));
  return *value.text();
}

std::int64_t ArgumentReader::integer(std::string_view name, std::int64_t otherwise) {
  const auto* value = next(name);
  if (!value || value->is_none()) return otherwise;
  const auto* given = value->as<std::int64_t>();
  if (!given) throw Problem(fmt::format("{}: '{}' must be an integer, got {}", callee_, name, value->type()));
  return *given;
}

bool ArgumentReader::boolean(std::string_view name, bool otherwise) {
  const auto* value = next(name);
  return value ? is_true(*value) : otherwise;
}

void ArgumentReader::done() const {
  if (position_ < arguments_.positional.size()) {
    throw Problem(fmt::format("{} takes {} arguments here, got {}", callee_, position_, arguments_.positional.size()));
  }
  if (named_used_ < arguments_.named.size()) {
    throw Problem(fmt::format("{} does not take all of these arguments: '{}' is the last", callee_,
                              arguments_.named.back().first));
  }
}

Value attribute(const Value& base, const std::string& name) {
  if (const auto* undefined = base.as<Undefined>()) {
    throw Problem(fmt::format("'{}' is undefined, so it has no '{}'", undefined->name, name));
  }
  if (has_method(base, name)) return Callable{name, std::make_shared<const Value>(base), nullptr, nullptr};
  if (const auto* dict = base.dict()) {
    if (const auto* value = dict->find(name)) return *value;
  }
  if (const auto* space = base.space()) {
    if (const auto place = space->attributes.find(name); place != space->attributes.end()) return place->second;
  }
  return Undefined{name};
}

Value element(const Value& base, const Value& key) {
  if (const auto* undefined = base.as<Undefined>())
    throw Problem(fmt::format("'{}' is undefined, so it has no elements", undefined->name));
  if (const auto* dict = base.dict(); dict && key.text()) {
    if (const auto* value = dict->find(key.text()->str())) return *value;
  }
  if (const auto* index = key.as<std::int64_t>()) {
    if (const auto* list = base.list()) {
      const auto size = static_cast<std::int64_t>(list->elements.size());
      const auto at = *index < 0 ? *index + size : *index;
      if (at >= 0 && at < size) return list->elements[static_cast<std::size_t>(at)];
    }
    if (const auto* text = base.text()) {
      const auto starts = code_point_starts(text->str());
      const auto size = static_cast<std::int64_t>(starts.size()) - 1;
      const auto at = *index < 0 ? *index + size : *index;
      if (at >= 0 && at < size) {
        const auto place = static_cast<std::size_t>(at);
        return text->substr(starts[place], starts[place + 1] - starts[place]);
      }
    }
    return Undefined{fmt::format("element {}", *index)};
  }
  if (key.text()) return base.dict() ? Value(Undefined{key.text()->str()}) : attribute(base, key.text()->str());
  throw Problem(fmt::format("{} is no index", key.type()));
}

bool call_test(const std::string& name, const Value& input, const Arguments& arguments) {
  ArgumentReader reader(fmt::format("test '{}'", name), arguments);
  const auto answer = [&](bool value) {
    reader.done();
    return value;
  };
  const auto* boolean = input.as<bool>();
  const auto* integer = input.as<std::int64_t>();
  if (name == "defined") return answer(!input.is_undefined());
  if (name == "undefined") return answer(input.is_undefined());
  if (name == "none") return answer(input.is_none());
  if (name == "string") return answer(input.text() != nullptr);
  if (name == "mapping") return answer(input.dict() != nullptr);
  if (name == "sequence") return answer(input.text() || input.list() || input.dict());
  if (name == "iterable") return answer(input.text() || input.list() || input.dict() || input.is_undefined());
  if (name == "number") return answer(input.is_number());
  if (name == "integer") return answer(integer != nullptr);
  if (name == "float") return answer(input.as<double>() != nullptr);
  if (name == "boolean") return answer(boolean != nullptr);
  if (name == "true") return answer(boolean && *boolean);
  if (name == "false") return answer(boolean && !*boolean);
  if (name == "callable") return answer(input.callable() != nullptr);
  if (name == "odd" || name == "even") {
    if (!integer) throw Problem(fmt::format("test '{}' needs an integer, got {}", name, input.type()));
    return answer((*integer % 2 != 0) == (name == "odd"));
  }
  if (name == "divisibleby") {
    const auto divisor = reader.integer("num", 0);
    if (!integer || divisor == 0) throw Problem("test 'divisibleby' needs an integer and a divisor that is not 0");
    return answer(divisor == -1 || *integer % divisor == 0);
  }
  if (name == "equalto" || name == "eq" || name == "sameas") return answer(equal(input, reader.required("other")));
  if (name == "ne") return answer(!equal(input, reader.required("other")));
  if (name == "lt" || name == "lessthan") return answer(less(input, reader.required("other")));
  if (name == "gt" || name == "greaterthan") return answer(less(reader.required("other"), input));
  if (name == "le" || name == "ge") {
    const auto& other = reader.required("other");
    return answer(equal(input, other) || (name == "le" ? less(input, other) : less(other, input)));
  }
  if (name == "in") return answer(contains(reader.required("seq"), input));
  throw Problem(fmt::format("the test '{}' is unknown or not supported", name));
}

bool is_function(const std::string& name) {
  static constexpr std::array<std::string_view, 5> kNames = {"range", "namespace", "dict", "raise_exception",
                                                             "strftime_now"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

namespace {

Value range(Interpreter& interpreter, const Arguments& arguments) {
  ArgumentReader reader("range", arguments);
  std::int64_t begin = 0;
  std::int64_t end = reader.integer("stop", 0);
  if (arguments.positional.size() > 1) {
    begin = end;
    end = reader.integer("stop", 0);
  }
  const auto step = reader.integer("step", 1);
  reader.done();
  if (step == 0) throw Problem("range: the step is 0");
  std::vector<Value> elements;
  for (auto at = begin; step > 0 ? at < end : at > end;) {
    interpreter.charge_steps(1);
    elements.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  return List(std::move(elements));
}

Value date(Interpreter& interpreter, const Arguments& arguments) {
  ArgumentReader reader("strftime_now", arguments);
  const auto format = reader.text("format").str();
  reader.done();
  const auto now = interpreter.now();
  std::tm fields{};
  localtime_r(&now, &fields);
  char buffer[256];
  const auto size = std::strftime(buffer, sizeof buffer, format.c_str(), &fields);
  return Text(std::string_view(buffer, size), Origin::kTemplate);
}

}  // namespace

Value call_function(Interpreter& interpreter, const std::string& name, const Arguments& arguments) {
  if (name == "range") return range(interpreter, arguments);
  if (name == "strftime_now") return date(interpreter, arguments);
  ArgumentReader reader(name, arguments);
  if (name == "raise_exception") {
    const auto message = to_text(reader.required("message"));
    throw Problem("the template says: " + message.str());
  }
  Dict entries;
  if (!arguments.positional.empty()) {
    const auto& first = reader.required("mapping");
    reader.done();
    if (!first.dict()) throw Problem(fmt::format("{} needs a mapping, got {}", name, first.type()));
    for (const auto& [key, value] : first.dict()->entries) entries.set(key, value);
  }
  for (const auto& [key, value] : arguments.named) entries.set(Text(key, Origin::kTemplate), value);
  if (name == "dict") return entries;
  auto space = std::make_shared<Namespace>();
  for (const auto& [key, value] : entries.entries) space->set(key.str(), value);
  return space;
}

bool has_method(const Value& self, const std::string& name) {
  static constexpr std::array<std::string_view, 4> kOfDict = {"get", "items", "keys", "values"};
  static constexpr std::array<std::string_view, 17> kOfText = {
      "split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "startswith",   "endswith",    "replace",
      "upper", "lower",  "capitalize", "find",  "count",  "join",   "removeprefix", "removesuffix"};
  if (self.dict()) return std::find(kOfDict.begin(), kOfDict.end(), name) != kOfDict.end();
  if (self.text()) return std::find(kOfText.begin(), kOfText.end(), name) != kOfText.end();
  return false;
}

namespace {

Value dict_method(const std::string& name, const Dict& dict, const Arguments& arguments) {
  ArgumentReader reader(name, arguments);
  if (name == "get") {
    const auto& key = reader.required("key");
    const auto* otherwise = reader.next("default");
    reader.done();
    const auto* value = key.text() ? dict.find(key.text()->str()) : nullptr;
    return value ? *value : otherwise ? *otherwise : Value(None{});
  }
  reader.done();
  std::vector<Value> elements;
  for (const auto& [key, value] : dict.entries) {
    elements.push_back(name == "keys" ? Value(key) : name == "values" ? value : Value(List({key, value})));
  }
  return List(std::move(elements));
}

bool starts_or_ends(const std::string& text, const Value& affix, bool start) {
  if (const auto* list = affix.list()) {
    return std::any_of(list->elements.begin(), list->elements.end(),
                       [&](const Value& one) { return starts_or_ends(text, one, start); });
  }
  if (!affix.text()) throw Problem(fmt::format("startswith and endswith need a string, got {}", affix.type()));
  return start ? text.starts_with(affix.text()->str()) : text.ends_with(affix.text()->str());
}

Value split(const Text& text, const Text* separator, std::int64_t most, bool from_right) {
  std::vector<std::pair<std::size_t, std::size_t>> gaps;  // begin and end of each separator found
  const auto& bytes = text.str();
  std::vector<Value> pieces;
  if (separator) {
    if (separator->empty()) throw Problem("split: the separator is empty");
    const auto size = separator->size();
    if (from_right) {
      for (auto at = bytes.rfind(separator->str()); at != std::string::npos && (most < 0 || std::ssize(gaps) < most);) {
        gaps.insert(gaps.begin(), {at, at + size});
        at = at < size ? std::string::npos : bytes.rfind(separator->str(), at - size);
      }
    } else {
      for (auto at = bytes.find(separator->str()); at != std::string::npos && (most < 0 || std::ssize(gaps) < most);
           at = bytes.find(separator->str(), at + size)) {
        gaps.emplace_back(at, at + size);
      }
    }
    std::size_t begin = 0;
    for (const auto& [gap, end] : gaps) {
      pieces.emplace_back(text.substr(begin, gap - begin));
      begin = end;
    }
    pieces.emplace_back(text.substr(begin));
    return List(std::move(pieces));
  }
  if (from_right && most >= 0) throw Problem("rsplit with a limit needs a separator");
  for (std::size_t at = 0; at < bytes.size();) {
    if (is_space(code_point_at(bytes, at))) {
      at += code_point_size(bytes[at]);
      continue;
    }
    auto end = at;
    if (most >= 0 && std::ssize(pieces) == most) {
      pieces.emplace_back(text.substr(at));  // as in Python, with the white space at its end
      break;
    }
    while (end < bytes.size() && !is_space(code_point_at(bytes, end))) end += code_point_size(bytes[end]);
    pieces.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return List(std::move(pieces));
}

Value split_lines(const Text& text) {
  std::vector<Value> lines;
  const auto& bytes = text.str();
  for (std::size_t begin = 0; begin < bytes.size();) {
    const auto end = std::min(bytes.find_first_of("\r\n", begin), bytes.size());
    lines.emplace_back(text.substr(begin, end - begin));
    begin = end + (bytes.compare(end, 2, "\r\n") == 0 ? 2 : 1);
  }
  return List(std::move(lines));
}

}  // namespace

Value call_method(Interpreter& interpreter, const std::string& name, const Value& self, const Arguments& arguments) {
  if (const auto* dict = self.dict()) {
    interpreter.charge_steps(static_cast<std::int64_t>(name == "get" ? 1 : dict->entries.size()));
    return dict_method(name, *dict, arguments);
  }
  const Text& text = *self.text();
  interpreter.charge_bytes(text.size());
  ArgumentReader reader(name, arguments);
  const auto finish = [&](Value value) {
    reader.done();
    return value;
  };
  if (name == "split" || name == "rsplit") {
    const auto* separator = reader.next("sep");
    if (separator && !separator->is_none() && !separator->text())
      throw Problem(fmt::format("{}: the separator is {}", name, separator->type()));
    const auto most = reader.integer("maxsplit", -1);
    interpreter.charge_steps(static_cast<std::int64_t>(text.size()) / 16);
    return finish(split(text, separator ? separator->text() : nullptr, most, name == "rsplit"));
  }
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const auto* characters = reader.next("chars");
    if (characters && !characters->is_none() && !characters->text())
      throw Problem(fmt::format("{}: the characters are {}", name, characters->type()));
    return finish(strip(text, characters ? characters->text() : nullptr, name != "rstrip", name != "lstrip"));
  }
  if (name == "startswith" || name == "endswith") {
    return finish(starts_or_ends(text.str(), reader.required("prefix"), name == "startswith"));
  }
  if (name == "removeprefix") {
    const auto& prefix = reader.text("prefix");
    return finish(text.str().starts_with(prefix.str()) ? text.substr(prefix.size()) : text);
  }
  if (name == "removesuffix") {
    const auto& suffix = reader.text("suffix");
    return finish(text.str().ends_with(suffix.str()) ? text.substr(0, text.size() - suffix.size()) : text);
  }
  if (name == "replace") {
    const auto& from = reader.text("old");
    const auto& to = reader.text("new");
    return finish(replace(interpreter, text, from, to, reader.integer("count", -1)));
  }
  if (name == "upper" || name == "lower") return finish(change_case(text, name == "upper"));
  if (name == "capitalize") return finish(capitalize(text));
  if (name == "splitlines") return finish(split_lines(text));
  if (name == "find") {
    const auto at = text.str().find(reader.text("sub").str());
    return finish(at == std::string::npos ? std::int64_t{-1}
                                          : static_cast<std::int64_t>(count_code_points(text.str().substr(0, at))));
  }
  if (name == "count") {
    const auto& part = reader.text("sub").str();
    if (part.empty()) throw Problem("count: the text to count is empty");
    std::int64_t count = 0;
    for (auto at = text.str().find(part); at != std::string::npos; at = text.str().find(part, at + part.size()))
      ++count;
    return finish(count);
  }
  const auto elements = iterate(reader.required("iterable"));  // "join"
  for (const auto& one : elements) {
    if (!one.text()) throw Problem(fmt::format("join needs strings, got {}", one.type()));
  }
  return finish(join(interpreter, elements, text));
}

}  // namespace sluice::jinja
