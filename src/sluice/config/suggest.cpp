// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/suggest.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "sluice/core/edit_distance.h"

namespace sluice {
namespace {

// A key longer than this has no typing mistake that a distance would explain, and the distance is quadratic.
constexpr std::size_t kLongestName = 100;
constexpr std::string_view kNothingNear = "; --help lists all";

std::size_t allowed_distance(std::string_view text) { return std::max<std::size_t>(1, text.size() / 3); }

bool begins_other(std::string_view a, std::string_view b) {
  return std::min(a.size(), b.size()) >= 3 && (a.starts_with(b) || b.starts_with(a));
}

bool is_near(std::string_view text, std::string_view candidate) {
  return edit_distance(text, candidate) <= allowed_distance(text) || begins_other(text, candidate);
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// A way to write an option: its name, the last part of it, its short name, or another program's name for it.
struct Candidate {
  std::string spelling;
  std::string name;
  std::string_view synonym;  // as that program writes it; empty for our own spellings
};

void add_options(const OptionList& list, std::vector<Candidate>& candidates) {
  for (const auto& option : list.options()) {
    candidates.push_back({option.name, option.name, ""});
    candidates.push_back({std::string(last_part(option.name)), option.name, ""});
    if (!option.traits.alias.empty()) candidates.push_back({std::string(option.traits.alias), option.name, ""});
    for (const auto synonym : option.traits.synonyms) {
      candidates.push_back({snake_case(synonym), option.name, synonym});
    }
  }
}

// What may be meant by `key`: a section only where the key names none.
std::vector<Candidate> candidates_of(const OptionList& list, std::string_view key) {
  std::vector<Candidate> candidates;
  add_options(list, candidates);
  if (key.find('.') == std::string_view::npos) {
    for (const auto& section : list.sections()) candidates.push_back({section.name, section.name, ""});
  }
  for (const auto& tables : list.tables()) {
    candidates.push_back({tables.name, tables.name, ""});
    tables.with_blank([&](const OptionList& blank) { add_options(blank, candidates); });
  }
  return candidates;
}

}  // namespace

std::string nearest(std::string_view text, const std::vector<std::string_view>& candidates) {
  if (text.size() > kLongestName) return {};
  std::string_view best;
  auto best_distance = std::string_view::npos;
  for (const auto candidate : candidates) {
    if (!is_near(text, candidate)) continue;
    const auto distance = edit_distance(text, candidate);
    if (distance < best_distance) std::tie(best, best_distance) = std::pair(candidate, distance);
  }
  return std::string(best);
}

std::string suggestion(const OptionList& list, std::string_view unknown_key) {
  const auto key = snake_case(unknown_key);
  const auto last = last_part(key);
  if (key.size() > kLongestName) return std::string(kNothingNear);
  // How well a candidate fits: first by kind of likeness, then by distance.
  const auto fit = [&](const Candidate& candidate) -> std::pair<int, std::size_t> {
    if (candidate.spelling == key) return {0, 0};
    if (candidate.spelling == last) return {1, edit_distance(key, candidate.name)};  // right name, wrong section
    if (is_near(key, candidate.spelling)) return {2, edit_distance(key, candidate.spelling)};
    if (is_near(last, candidate.spelling)) return {3, edit_distance(last, candidate.spelling)};
    return {4, 0};
  };
  Candidate best;
  std::pair<int, std::size_t> best_fit{4, 0};
  for (const auto& candidate : candidates_of(list, key)) {
    if (const auto candidate_fit = fit(candidate); candidate_fit < best_fit) {
      std::tie(best, best_fit) = std::pair(candidate, candidate_fit);
    }
  }
  if (best_fit.first == 4) return std::string(kNothingNear);
  return fmt::format(": did you mean {}{}?", best.name,
                     best.synonym.empty() ? "" : fmt::format(" (called {} elsewhere)", best.synonym));
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
