// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/toml_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "sluice/config/suggest.h"
#include "sluice/config/values.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"

// toml++ 3.3 asserts where it should refuse a broken heading such as "[[[". Here that is one more thing it cannot
// parse.
struct BrokenToml {};
[[noreturn]] static void refuse_broken_toml() { throw BrokenToml(); }
#define TOML_ASSERT(condition) ((condition) ? static_cast<void>(0) : refuse_broken_toml())
#include <toml++/toml.h>

namespace sluice {
namespace {

constexpr std::uint64_t kLargestFile = std::uint64_t{16} << 20;  // a run file has a few kilobytes

// Where a key stands: "run.toml:14: optim.lr", or the option that was typed.
struct Source {
  std::string_view name;
  bool has_lines;
  std::string at(const toml::source_region& region) const {
    return has_lines ? fmt::format("{}:{}", name, region.begin.line) : std::string(name);
  }
  std::string at(const toml::source_region& region, std::string_view key) const {
    return fmt::format("{}: {}", at(region), key);
  }
};

std::string_view found(const toml::node& node) {
  if (node.is_table()) return "a section";
  if (node.is_array()) return "a list";
  if (node.is_string()) return "text";
  if (node.is_boolean()) return "true or false";
  if (node.is_number()) return "a number";
  return "a date or time";
}

Scalar read_scalar(const Option& option, const toml::node& node, std::string_view where) {
  if (const auto* boolean = node.as_boolean()) return boolean->get();
  if (const auto* integer = node.as_integer()) return integer->get();
  if (const auto* number = node.as_floating_point()) return number->get();
  const auto* text = node.as_string();
  if (text == nullptr) fail_usage("{}: expected {}, got {}", where, expected_value(option), found(node));
  const bool textual = option.type == ValueType::kText || option.type == ValueType::kPath;
  if (!textual && option.count != ValueCount::kMany &&
      !std::holds_alternative<std::string>(parse_values(option, text->get(), where).at(0))) {
    fail_usage("{}: expected {}, got \"{}\"; write it without quotes", where, expected_value(option), text->get());
  }
  return text->get();
}

void set_from_node(const Option& option, const toml::node& node, std::string_view where) {
  if (option.count == ValueCount::kOptional && node.value<std::string_view>() == "none") {
    set_option(option, {}, where);
    return;
  }
  if (option.count != ValueCount::kMany) {
    set_option(option, {read_scalar(option, node, where)}, where);
    return;
  }
  const auto* array = node.as_array();
  if (array == nullptr) fail_usage("{}: expected {}, got {}", where, expected_value(option), found(node));
  Scalars values;
  for (const auto& element : *array) values.push_back(read_scalar(option, element, where));
  set_option(option, std::move(values), where);
}

void apply_table(const OptionList& list, const toml::table& table, const std::string& prefix, const Source& source);

void set_from_node(const OptionTables& tables, const toml::node& node, const Source& source) {
  const auto* array = node.as_array();
  const bool right =
      array != nullptr && std::all_of(array->begin(), array->end(), [](auto& e) { return e.is_table(); });
  if (!right) {
    fail_usage("{}: expected a list of tables, written [[{}]], got {}", source.at(node.source(), tables.name),
               tables.name, array != nullptr ? "a list of something else" : found(node));
  }
  tables.resize(0);
  tables.resize(array->size());
  for (std::size_t i = 0; i < array->size(); ++i) {
    apply_table(tables.entry(i), *array->get(i)->as_table(), fmt::format("{}.{}.", tables.name, i), source);
  }
}

template <typename T>
const T* find_named(const std::vector<T>& items, std::string_view name) {
  const auto found = std::find_if(items.begin(), items.end(), [&](const T& item) { return item.name == name; });
  return found == items.end() ? nullptr : &*found;
}

// "; write model.path = ..." where a section's name stands for one of its settings.
std::string alias_hint(const OptionList& list, std::string_view section) {
  for (const auto& option : list.options()) {
    if (option.traits.alias == section) return fmt::format("; write {} = ...", option.name);
  }
  return "";
}

void apply_entry(const OptionList& list, const std::string& name, const toml::node& node,
                 const toml::source_region& region, const Source& source) {
  if (const auto* option = find_named(list.options(), name)) {
    if (!option->traits.saved) {
      fail_usage("{}: only for the command line, as {}", source.at(region, name), flag_of(*option));
    }
    set_from_node(*option, node, source.at(region, name));
  } else if (const auto* tables = find_named(list.tables(), name)) {
    set_from_node(*tables, node, source);
  } else if (find_named(list.sections(), name) != nullptr) {
    if (!node.is_table()) {
      fail_usage("{}: expected a section, written [{}], got {}{}", source.at(region, name), name, found(node),
                 alias_hint(list, name));
    }
    apply_table(list, *node.as_table(), name + ".", source);
  } else {
    const bool section = node.is_table();
    fail_usage("{}: unknown {} \"{}\"{}", source.at(region), section ? "section" : "key", name,
               section ? section_suggestion(list, name) : suggestion(list, name));
  }
}

// Entries in the order of the file, so that the first mistake is the one reported.
void apply_table(const OptionList& list, const toml::table& table, const std::string& prefix, const Source& source) {
  std::vector<std::pair<const toml::key*, const toml::node*>> entries;
  for (const auto& [key, node] : table) entries.emplace_back(&key, &node);
  const auto position = [](const auto& entry) {
    return std::pair(entry.first->source().begin.line, entry.first->source().begin.column);
  };
  std::sort(entries.begin(), entries.end(), [&](auto& a, auto& b) { return position(a) < position(b); });
  std::set<std::string> seen;
  for (const auto& [key, node] : entries) {
    const auto name = prefix + snake_case(key->str());
    if (!seen.insert(name).second) fail_usage("{}: set twice", source.at(key->source(), name));
    apply_entry(list, name, *node, key->source(), source);
  }
}

toml::table parse(std::string_view text, const Source& source) {
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail_usage("{}: not valid TOML: {}", source.at(error.source()), error.description());
  } catch (const BrokenToml&) {
    fail_usage("{}: not valid TOML", source.name);
  }
}

}  // namespace

void apply_toml(const OptionList& list, std::string_view text, std::string_view source) {
  const Source lines{source, true};
  apply_table(list, parse(text, lines), "", lines);
}

void apply_toml_file(const OptionList& list, const std::filesystem::path& path) {
  if (!std::filesystem::is_regular_file(path)) fail_usage("{}: no such file", path.string());
  apply_toml(list, read_file(path, kLargestFile), path.string());
}

void apply_toml_array(const Option& option, std::string_view text, std::string_view where) {
  const auto table = parse(fmt::format("array = {}", text), {where, false});
  set_from_node(option, *table.get("array"), where);
}

void apply_toml_array(const OptionTables& tables, std::string_view text, std::string_view where) {
  const auto table = parse(fmt::format("array = {}", text), {where, false});
  set_from_node(tables, *table.get("array"), {where, false});
}

}  // namespace sluice
