// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/command_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <optional>

#include "sluice/config/suggest.h"
#include "sluice/config/toml_reader.h"
#include "sluice/config/values.h"
#include "sluice/core/error.h"

namespace sluice {
namespace {

struct Setting {
  std::string typed;  // "--optim.lr", for errors
  std::string key;    // "optim.lr"
  std::optional<std::string> value;
};

std::optional<Option> find_option(const OptionList& list, std::string_view key);

// NAME.index.key; an index one past the end adds an entry.
std::optional<Option> find_in_tables(const OptionTables& tables, std::string_view key) {
  if (!key.starts_with(tables.name + ".")) return std::nullopt;
  const auto rest = key.substr(tables.name.size() + 1);
  std::size_t index = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
  if (error != std::errc() || end == rest.data() + rest.size() || *end != '.') return std::nullopt;
  if (index > tables.size()) {
    fail_usage("{}: {} has {} entries; the next has the index {}", key, tables.name, tables.size(), tables.size());
  }
  if (index == tables.size()) tables.resize(index + 1);
  return find_option(tables.entry(index), key);
}

std::optional<Option> find_option(const OptionList& list, std::string_view key) {
  for (const auto& option : list.options()) {
    if (option.name == key || (!option.traits.alias.empty() && option.traits.alias == key)) return option;
  }
  for (const auto& tables : list.tables()) {
    if (auto option = find_in_tables(tables, key)) return option;
  }
  return std::nullopt;
}

bool is_flag(const Option& option) { return option.type == ValueType::kBool && option.count != ValueCount::kMany; }

std::string_view short_name(const Option& option) {
  return option.traits.alias.empty() ? std::string_view(option.name) : option.traits.alias;
}

bool looks_like_setting(std::string_view argument) {
  const auto key = argument.substr(0, argument.find('='));
  return key.size() < argument.size() && !key.empty() && std::all_of(key.begin(), key.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
         });
}

Setting split_setting(std::string_view argument) {
  const auto equals = argument.find('=');
  const auto typed = argument.substr(0, equals);
  const auto bare = typed.starts_with("--") ? typed.substr(2) : typed;
  Setting setting{std::string(typed), snake_case(bare), std::nullopt};
  if (equals != std::string_view::npos) setting.value = argument.substr(equals + 1);
  return setting;
}

void apply_value(const Option& option, std::string_view text, std::string_view where) {
  if (option.traits.repeated) {
    auto values = option.get();
    values.emplace_back(std::string(text));
    set_option(option, std::move(values), where);
  } else if (option.count == ValueCount::kMany && text.starts_with('[')) {
    apply_toml_array(option, text, where);
  } else {
    set_option(option, parse_values(option, text, where), where);
  }
}

struct Applied {
  bool took_next;  // the argument behind it was its value
  bool saved;      // part of the configuration, so that a later file could override it
};

void add(Origins& origins, Origins later) {
  later.merge(origins);
  origins = std::move(later);
}

// Applies one setting; `next` is the argument behind it, or null.
Applied apply_setting(const OptionList& list, const Setting& setting, const std::string* next, Origins& origins) {
  const auto value_of = [&](std::string_view expected) {
    if (setting.value) return *setting.value;
    if (next == nullptr || next->starts_with("--")) fail_usage("{}: needs a value: {}", setting.typed, expected);
    return *next;
  };
  if (const auto option = find_option(list, setting.key)) {
    if (is_flag(*option) && !setting.value) {
      const bool has_word = next != nullptr && (*next == "true" || *next == "false");
      set_option(*option, {!has_word || *next == "true"}, setting.typed);
      return {has_word, option->traits.saved};
    }
    apply_value(*option, value_of(expected_value(*option)), setting.typed);
    origins[option->name] = setting.typed;
    return {!setting.value, option->traits.saved};
  }
  for (const auto& tables : list.tables()) {
    if (tables.name != setting.key) continue;
    add(origins, apply_toml_array(tables, value_of("a TOML list of tables"), setting.typed));
    return {!setting.value, true};
  }
  if (setting.key.starts_with("no_")) {
    const auto option = find_option(list, setting.key.substr(3));
    if (option && is_flag(*option)) {
      if (setting.value) fail_usage("{}: takes no value", setting.typed);
      set_option(*option, {false}, setting.typed);
      return {false, option->traits.saved};
    }
  }
  fail_usage("unknown option \"{}\"{}", setting.typed, suggestion(list, setting.key));
}

}  // namespace

void CommonOptions::describe(OptionList& option) {
  option("dry_run", dry_run, "check everything, print sizes, run nothing", {.saved = false});
  option("print_config", print_config, "print the resolved configuration as TOML and end", {.saved = false});
  option("quiet", quiet, "show warnings and errors alone", {.saved = false});
  option("debug", debug, "show the type and the whole text of an error", {.saved = false});
}

HelpRequest find_help(const OptionList& list, std::span<const std::string> arguments) {
  const auto help =
      std::find_if(arguments.begin(), arguments.end(), [](auto& a) { return a == "--help" || a == "-h"; });
  if (help == arguments.end()) return {};
  if (help + 1 == arguments.end()) return {.wanted = true, .section = ""};
  const auto section = snake_case(*(help + 1));
  const auto& sections = list.sections();
  const bool known = std::any_of(sections.begin(), sections.end(), [&](auto& s) { return s.name == section; });
  return {.wanted = true, .section = known ? section : ""};
}

Origins apply_command_line(const OptionList& list, std::span<const std::string> arguments) {
  Origins origins;
  std::string first_setting;
  bool operand_given = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    if (argument.starts_with("--") || looks_like_setting(argument)) {
      const auto setting = split_setting(argument);
      const auto* next = argument.starts_with("--") && i + 1 < arguments.size() ? &arguments[i + 1] : nullptr;
      const auto applied = apply_setting(list, setting, next, origins);
      if (applied.took_next) ++i;
      if (applied.saved && first_setting.empty()) first_setting = setting.typed;
    } else if (argument.ends_with(".toml")) {
      if (!first_setting.empty()) {
        fail_usage("{}: a file behind {} would override it; name files first", argument, first_setting);
      }
      add(origins, apply_toml_file(list, argument));
    } else if (const auto operand = std::ranges::find_if(list.options(), [](auto& o) { return o.traits.positional; });
               operand != list.options().end()) {
      if (operand_given) fail_usage("unexpected argument \"{}\": {} was given before", argument, operand->name);
      set_option(*operand, {argument}, argument);
      operand_given = true;
    } else {
      fail_usage("unexpected argument \"{}\": expected a .toml file, --key value or key=value", argument);
    }
  }
  return origins;
}

void check_required(const OptionList& list) {
  for (const auto& option : list.options()) {
    if (!option.traits.required) continue;
    const auto values = option.get();
    if (!values.empty() && values[0] != Scalar(std::string())) continue;
    fail_usage("{}: required; give --{} {}{}", option.name, short_name(option), value_placeholder(option),
               option.traits.saved ? " or set it in a run file" : "");
  }
  for (const auto& tables : list.tables()) {
    for (std::size_t i = 0; i < tables.size(); ++i) check_required(tables.entry(i));
  }
}

void check_inputs(const OptionList& list, const Origins& origins) {
  for (const auto& option : list.options()) {
    if (!option.traits.input) continue;
    for (const auto& value : option.get()) {
      const std::filesystem::path path(std::get<std::string>(value));
      std::error_code error;
      if (path.empty() || std::filesystem::exists(path, error)) continue;
      const auto origin = origins.find(option.name);
      fail_data("{}: {}: {}{}", origin == origins.end() ? option.name : origin->second, path.string(),
                error ? error.message() : "no such file or folder",
                path.is_absolute() ? "" : fmt::format(" in {}", std::filesystem::current_path(error).string()));
    }
  }
  for (const auto& tables : list.tables()) {
    for (std::size_t i = 0; i < tables.size(); ++i) check_inputs(tables.entry(i), origins);
  }
}

}  // namespace sluice
