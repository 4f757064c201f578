// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/writer.h"

#include <fmt/format.h>

#include <algorithm>

#include "sluice/config/values.h"

namespace sluice {
namespace {

constexpr std::size_t kHelpWidth = 100;
constexpr std::size_t kHelpIndent = 30;  // column of the sentences

// "optim" of "optim.lr"; empty at the root.
std::string_view section_of(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }

void append(std::vector<std::string_view>& sections, std::string_view section) {
  if (std::find(sections.begin(), sections.end(), section) == sections.end()) sections.push_back(section);
}

// Sections that hold settings, in order; `root` first, since TOML has no way back to it.
std::vector<std::string_view> sections_of(const OptionList& list, std::string_view root) {
  std::vector<std::string_view> sections{root};
  for (const auto& option : list.options()) append(sections, section_of(option.name));
  for (const auto& tables : list.tables()) append(sections, section_of(tables.name));
  return sections;
}

std::string section_lines(const OptionList& list, std::string_view section) {
  std::string lines;
  for (const auto& option : list.options()) {
    if (!option.traits.saved || section_of(option.name) != section) continue;
    lines += fmt::format("{} = {}\n", last_part(option.name), to_toml(option, option.get()));
  }
  for (const auto& tables : list.tables()) {
    if (section_of(tables.name) == section && tables.size() == 0)
      lines += fmt::format("{} = []\n", last_part(tables.name));
  }
  return lines;
}

// `root` is the list's own place ("" or "data.sources.0"), `heading` its name in TOML ("" or "data.sources").
void write_level(std::string& out, const OptionList& list, std::string_view root, const std::string& heading) {
  const auto place = [&](std::string_view name) {  // "data.sources.0.part" is [data.sources.part]
    return heading.empty() ? std::string(name) : heading + std::string(name.substr(root.size()));
  };
  for (const auto section : sections_of(list, root)) {
    const auto lines = section_lines(list, section);
    if (section != root && !lines.empty()) out += fmt::format("\n[{}]\n", place(section));
    out += lines;
  }
  for (const auto& tables : list.tables()) {
    for (std::size_t i = 0; i < tables.size(); ++i) {
      out += fmt::format("\n[[{}]]\n", place(tables.name));
      write_level(out, tables.entry(i), fmt::format("{}.{}", tables.name, i), place(tables.name));
    }
  }
}

using Rows = std::vector<std::pair<std::string, std::string>>;  // name, "value (default value)"

// `defaults` is the same declaration bound to untouched fields, or `list` itself if it was declared before any change.
void collect_changed(const OptionList& list, const OptionList& defaults, Rows& rows) {
  for (std::size_t i = 0; i < list.options().size(); ++i) {
    const auto& option = list.options()[i];
    const auto& initial = defaults.options()[i].initial;
    const auto values = option.get();
    if (!option.traits.saved || values == initial) continue;
    rows.emplace_back(option.name, fmt::format("{} (default {})", to_plain(option, values), to_plain(option, initial)));
  }
  for (const auto& tables : list.tables()) {
    tables.with_blank([&](const OptionList& blank) {
      for (std::size_t i = 0; i < tables.size(); ++i) collect_changed(tables.entry(i), blank, rows);
    });
  }
}

// `text` in lines of at most `kHelpWidth`, the second and later ones indented.
std::string wrapped(std::string_view text) {
  std::string out;
  std::size_t column = kHelpIndent;
  while (!text.empty()) {
    const auto word = text.substr(0, text.find(' '));
    if (column > kHelpIndent && column + 1 + word.size() > kHelpWidth) {
      out += "\n" + std::string(kHelpIndent, ' ');
      column = kHelpIndent;
    } else if (column > kHelpIndent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    text.remove_prefix(std::min(word.size() + 1, text.size()));
  }
  return out;
}

std::string limits(const OptionTraits& traits) {
  if (traits.min && traits.max) return fmt::format("{} to {}", *traits.min, *traits.max);
  if (traits.min) return fmt::format("at least {}", *traits.min);
  if (traits.max) return fmt::format("at most {}", *traits.max);
  return "";
}

std::string help_line(const Option& option) {
  auto left = "  " + flag_of(option);
  const bool plain_flag = option.type == ValueType::kBool && option.count == ValueCount::kOne;
  if (!plain_flag) left += " " + value_placeholder(option);
  std::vector<std::string> notes;
  if (!option.traits.unit.empty()) notes.push_back(fmt::format("in {}", option.traits.unit));
  if (const auto text = limits(option.traits); !text.empty()) notes.push_back(text);
  if (option.traits.required) {
    notes.emplace_back("required");
  } else if (option.traits.saved) {
    notes.push_back(fmt::format("default {}", to_plain(option, option.initial)));
  }
  if (!option.traits.alias.empty()) notes.push_back(fmt::format("also --{}", option.traits.alias));
  const auto right =
      notes.empty() ? std::string(option.sentence) : fmt::format("{} ({})", option.sentence, fmt::join(notes, "; "));
  const auto gap = left.size() + 2 <= kHelpIndent ? std::string(kHelpIndent - left.size(), ' ')
                                                  : "\n" + std::string(kHelpIndent, ' ');
  return left + gap + wrapped(right) + "\n";
}

bool inside(std::string_view name, std::string_view section) {
  return section.empty() || name == section || (name.starts_with(section) && name[section.size()] == '.');
}

std::string heading(const OptionList& list, std::string_view name) {
  for (const auto& section : list.sections()) {
    if (section.name == name) return fmt::format("\n{}: {}\n", name, section.sentence);
  }
  return "\n";
}

}  // namespace

std::string to_toml(const OptionList& list) {
  std::string out;
  write_level(out, list, "", "");
  return out.starts_with('\n') ? out.substr(1) : out;
}

std::string changed_settings(const OptionList& list) {
  Rows rows;
  collect_changed(list, list, rows);
  std::size_t width = 0;
  for (const auto& [name, text] : rows) width = std::max(width, name.size());
  std::string out;
  for (const auto& [name, text] : rows) out += fmt::format("{:<{}}  {}\n", name, width, text);
  return out;
}

std::string option_help(const OptionList& list, std::string_view section) {
  std::string out;
  for (const auto name : sections_of(list, "")) {
    std::string lines;
    for (const auto& option : list.options()) {
      if (section_of(option.name) == name && inside(option.name, section)) lines += help_line(option);
    }
    if (!lines.empty()) out += heading(list, name) + lines;
  }
  for (const auto& tables : list.tables()) {
    if (!inside(tables.name, section)) continue;
    out += fmt::format("\n{}: {} (a list of tables: [[{}]] in a file, N = 0, 1, ... here)\n", tables.name,
                       tables.sentence, tables.name);
    tables.with_blank([&](const OptionList& blank) {
      for (const auto& option : blank.options()) out += help_line(option);
    });
  }
  return out;
}

}  // namespace sluice
