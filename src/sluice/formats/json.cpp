// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace {

using nlohmann::json;

std::string line_and_column(std::string_view text, std::size_t position) {
  const auto before = text.substr(0, std::min(position, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const auto line_start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return fmt::format("{}:{}", line, before.size() - line_start + 1);
}

}  // namespace

json parse_json(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> names;  // of the objects that are open
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth >= kMaxJsonDepth) fail_data("{}: nests deeper than {} levels", file, kMaxJsonDepth);
    if (event == json::parse_event_t::object_start) {
      names.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      names.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!names.back().insert(name).second) fail_data("{}: \"{}\" stands twice in one object", file, printable(name));
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    // The library's message repeats the offending text; the position is what a person needs.
    fail_data("{}:{}: not valid JSON", file, line_and_column(text, error.byte == 0 ? 0 : error.byte - 1));
  } catch (const json::out_of_range&) {
    fail_data("{}: a number is too large", file);
  }
}

json read_json_object(const std::filesystem::path& path, std::uint64_t max_bytes) {
  auto value = parse_json(read_file(path, max_bytes), path.string());
  if (!value.is_object()) fail_data("{}: expected a JSON object, found {}", path.string(), value.type_name());
  return value;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kShown = 200;
  const auto escaped = json(text.substr(0, kShown)).dump(-1, ' ', false, json::error_handler_t::replace);
  return escaped.substr(1, escaped.size() - 2) + (text.size() > kShown ? "..." : "");
}

}  // namespace sluice
