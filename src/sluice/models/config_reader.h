// SPDX-License-Identifier: Apache-2.0
// Reads a family's config.json key by key, with errors that name file, key, what was expected and what was found.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace sluice {

class ConfigReader {
 public:
  // `where` names the object in messages, e.g. "model/config.json: text_config".
  ConfigReader(const nlohmann::json& object, std::string where);

  // A positive whole number, at most `most`: far above any model, and so low that products of sizes fit into 64 bits.
  // Without a default the key must be there.
  std::int64_t size(const std::string& key, std::optional<std::int64_t> fallback = {},
                    std::int64_t most = 1 << 20) const;
  double number(const std::string& key, std::optional<double> fallback = {}) const;
  bool flag(const std::string& key, bool fallback) const;
  std::vector<std::string> strings(const std::string& key) const;    // empty where absent
  std::vector<std::int64_t> integers(const std::string& key) const;  // one alone is a list of one; empty where absent

  // A key whose only supported values are `supported`; absent counts as the first of them.
  void require(const std::string& key, const std::vector<nlohmann::json>& supported) const;

  // The object below `key`, empty where absent.
  ConfigReader object(const std::string& key) const;
  bool has(const std::string& key) const;  // present and not null
  bool is(const std::string& key, const nlohmann::json& value) const;

  [[noreturn]] void fail_at(const std::string& key, const std::string& expected) const;

 private:
  const nlohmann::json& at(const std::string& key) const;  // null where absent

  nlohmann::json object_;
  std::string where_;
};

}  // namespace sluice
