// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/suggest.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

namespace sluice {
namespace {

// A key longer than this has no typing mistake that a distance would explain, and the distance is quadratic.
constexpr std::size_t kLongestName = 100;

std::size_t allowed_distance(std::string_view text) { return std::max<std::size_t>(1, text.size() / 3); }

bool begins_other(std::string_view a, std::string_view b) {
  return std::min(a.size(), b.size()) >= 3 && (a.starts_with(b) || b.starts_with(a));
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// "optim.lr (called learning_rate elsewhere)".
std::string synonym_shown(const Option& option, std::string_view synonym) {
  return fmt::format("{} (called {} elsewhere)", option.name, synonym);
}

// A name that leads to an option, and how it is written in the suggestion.
struct Candidate {
  std::string spelling;
  std::string shown;
};

std::vector<Candidate> candidates_of(const OptionList& list) {
  std::vector<Candidate> candidates;
  const auto add = [&](const OptionList& level) {
    for (const auto& option : level.options()) {
      candidates.push_back({option.name, option.name});
      candidates.push_back({std::string(last_part(option.name)), option.name});
      if (!option.traits.alias.empty()) candidates.push_back({std::string(option.traits.alias), option.name});
      for (const auto synonym : option.traits.synonyms) {
        candidates.push_back({snake_case(synonym), synonym_shown(option, synonym)});
      }
    }
  };
  add(list);
  for (const auto& section : list.sections()) candidates.push_back({section.name, section.name});
  for (const auto& tables : list.tables()) {
    candidates.push_back({tables.name, tables.name});
    tables.with_blank(add);
  }
  return candidates;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // rows[i] holds the distances of the first i letters of a to every beginning of b; a swap looks two rows back.
  std::vector<std::vector<std::size_t>> rows(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) rows[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) rows[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = rows[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      rows[i][j] = std::min({rows[i - 1][j] + 1, rows[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        rows[i][j] = std::min(rows[i][j], rows[i - 2][j - 2] + 1);
      }
    }
  }
  return rows[a.size()][b.size()];
}

std::string nearest(std::string_view text, const std::vector<std::string_view>& candidates) {
  if (text.size() > kLongestName) return {};
  std::string_view best;
  auto best_distance = std::string_view::npos;
  for (const auto candidate : candidates) {
    const auto distance = edit_distance(text, candidate);
    if (distance > allowed_distance(text) && !begins_other(text, candidate)) continue;
    if (distance < best_distance) std::tie(best, best_distance) = std::pair(candidate, distance);
  }
  return std::string(best);
}

std::string suggestion(const OptionList& list, std::string_view unknown_key) {
  const auto key = snake_case(unknown_key);
  const auto candidates = candidates_of(list);
  std::vector<std::string_view> spellings;
  for (const auto& candidate : candidates) spellings.push_back(candidate.spelling);
  const auto last = last_part(key);
  const bool last_exists = std::find(spellings.begin(), spellings.end(), last) != spellings.end();
  auto found = last_exists ? std::string(last) : nearest(key, spellings);  // right name, wrong section: sure
  if (found.empty()) found = nearest(last, spellings);
  if (found.empty()) return "; --help lists all";
  const auto candidate =
      std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& c) { return c.spelling == found; });
  return fmt::format(": did you mean {}?", candidate->shown);
}

std::string section_suggestion(const OptionList& list, std::string_view unknown_section) {
  std::vector<std::string_view> names;
  for (const auto& section : list.sections()) names.push_back(section.name);
  for (const auto& tables : list.tables()) names.push_back(tables.name);
  const auto near = nearest(unknown_section, names);
  return near.empty() ? suggestion(list, unknown_section) : fmt::format(": did you mean {}?", near);
}

std::string snake_case(std::string_view key) {
  std::string snake(key);
  std::replace(snake.begin(), snake.end(), '-', '_');
  return snake;
}

}  // namespace sluice
