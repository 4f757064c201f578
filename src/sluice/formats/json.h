// SPDX-License-Identifier: Apache-2.0
// JSON from files that nobody vouches for: size and nesting are bounded, a name that stands twice in one object is an
// error, and an error says file, line and column.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sluice {

inline constexpr std::size_t kMaxJsonDepth = 64;  // the files that we read nest below 10

// `file` names the source in errors. Data error if `text` is no JSON, nests deeper than kMaxJsonDepth, or repeats a
// name.
nlohmann::json parse_json(std::string_view text, const std::string& file);

// The whole of a JSON file of at most `max_bytes`, which must hold an object.
nlohmann::json read_json_object(const std::filesystem::path& path, std::uint64_t max_bytes);

// Untrusted text for a message: control characters are escaped, more than 200 bytes are cut.
std::string printable(std::string_view text);

}  // namespace sluice
