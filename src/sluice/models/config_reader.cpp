// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/config_reader.h"

#include <algorithm>
#include <cmath>

#include "sluice/core/error.h"

namespace sluice {

using nlohmann::json;

ConfigReader::ConfigReader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
  if (!object_.is_object()) fail_data("{}: expected an object, found {}", where_, object_.dump().substr(0, 80));
}

const json& ConfigReader::at(const std::string& key) const {
  static const json null;
  const auto found = object_.find(key);
  return found == object_.end() ? null : *found;
}

bool ConfigReader::has(const std::string& key) const { return !at(key).is_null(); }

bool ConfigReader::is(const std::string& key, const json& value) const { return at(key) == value; }

void ConfigReader::fail_at(const std::string& key, const std::string& expected) const {
  fail_data("{}.{}: expected {}, found {}", where_, key, expected, has(key) ? at(key).dump().substr(0, 80) : "nothing");
}

std::int64_t ConfigReader::size(const std::string& key, std::optional<std::int64_t> fallback, std::int64_t most) const {
  if (!has(key) && fallback) return *fallback;
  const auto& value = at(key);
  if (!value.is_number_integer() || value.get<std::int64_t>() < 1 || value.get<std::int64_t>() > most) {
    fail_at(key, fmt::format("a whole number from 1 to {}", most));
  }
  return value.get<std::int64_t>();
}

double ConfigReader::number(const std::string& key, std::optional<double> fallback) const {
  if (!has(key) && fallback) return *fallback;
  const auto& value = at(key);
  if (!value.is_number() || !std::isfinite(value.get<double>())) fail_at(key, "a number");
  return value.get<double>();
}

bool ConfigReader::flag(const std::string& key, bool fallback) const {
  if (!has(key)) return fallback;
  if (!at(key).is_boolean()) fail_at(key, "true or false");
  return at(key).get<bool>();
}

std::vector<std::string> ConfigReader::strings(const std::string& key) const {
  if (!has(key)) return {};
  const auto& list = at(key);
  if (!list.is_array() || !std::ranges::all_of(list, [](const json& item) { return item.is_string(); })) {
    fail_at(key, "a list of strings");
  }
  return list.get<std::vector<std::string>>();
}

std::vector<std::int64_t> ConfigReader::integers(const std::string& key) const {
  if (!has(key)) return {};
  if (at(key).is_number_integer()) return {at(key).get<std::int64_t>()};
  const auto& list = at(key);
  if (!list.is_array() || !std::ranges::all_of(list, [](const json& item) { return item.is_number_integer(); })) {
    fail_at(key, "whole numbers");
  }
  return list.get<std::vector<std::int64_t>>();
}

void ConfigReader::require(const std::string& key, const std::vector<json>& supported) const {
  if (!has(key) || std::ranges::find(supported, at(key)) != supported.end()) return;
  std::string names;
  for (const auto& value : supported) names += (names.empty() ? "" : " or ") + value.dump();
  fail_at(key, names + " (no other value is supported)");
}

ConfigReader ConfigReader::object(const std::string& key) const {
  if (!has(key)) return {json::object(), where_ + "." + key};
  if (!at(key).is_object()) fail_at(key, "an object");
  return {at(key), where_ + "." + key};
}

}  // namespace sluice
