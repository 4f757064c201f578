// SPDX-License-Identifier: Apache-2.0
// Records of a data file, one JSON object each: .jsonl (one a line) or .json (one array).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sluice {

struct Record {
  nlohmann::ordered_json json;  // an object
  std::string place;            // "chats.jsonl:17" (physical line), or "chats.json: record 17"
};

// Calls `use` for each record in the order of the file. A byte order mark, blank lines, CRLF and a missing last newline
// are fine. Data error with file and physical line for anything that is not a JSON object, that nests deeper than 200,
// whose objects have more than 1024 keys, or that is longer than 64 MiB (a .json file: 1 GiB as a whole).
void read_records(const std::filesystem::path& file, const std::function<void(Record)>& use);

// The value of `key`; null where it is absent.
nlohmann::ordered_json value_or_null(const nlohmann::ordered_json& object, const char* key);

}  // namespace sluice
