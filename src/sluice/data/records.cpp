// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/records.h"

#include <algorithm>
#include <vector>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::size_t kMaxRecordBytes = std::size_t{64} << 20;
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 30;  // of a .json file, which is held as a whole
constexpr int kMaxNesting = 200;
constexpr int kMaxKeys = 1024;  // of one object: a key is looked up by going through them

std::string_view without_byte_order_mark(std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  return text;
}

Json parse(std::string_view text, const std::string& place) {
  std::vector<int> keys;  // of the objects that are open
  const auto check = [&](int depth, Json::parse_event_t event, Json&) {
    if (depth > kMaxNesting) fail_data("{}: JSON nested more than {} deep", place, kMaxNesting);
    if (event == Json::parse_event_t::object_start) keys.push_back(0);
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && ++keys.back() > kMaxKeys)
      fail_data("{}: an object with more than {} keys", place, kMaxKeys);
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    fail_data("{}: not valid JSON at byte {} of the {}", place, error.byte, place.ends_with(".json") ? "file" : "line");
  } catch (const Json::out_of_range&) {
    fail_data("{}: a number in the JSON is out of range", place);
  }
}

void read_array(const fs::path& file, const std::function<void(Record)>& use) {
  const auto text = read_file(file, kMaxFileBytes);
  auto array = parse(without_byte_order_mark(text), file.string());
  if (!array.is_array())
    fail_data("{}: expected an array of records, got {}; one record a line is .jsonl", file.string(),
              array.type_name());
  for (std::size_t i = 0; i < array.size(); ++i) {
    const auto place = fmt::format("{}: record {}", file.string(), i + 1);
    if (!array[i].is_object()) fail_data("{}: expected an object, got {}", place, array[i].type_name());
    use({std::move(array[i]), place});
  }
}

}  // namespace

void read_records(const fs::path& file, const std::function<void(Record)>& use) {
  if (file.extension() == ".json") return read_array(file, use);
  const MappedFile mapped(file);
  auto rest = without_byte_order_mark({reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()});
  for (std::int64_t number = 1; !rest.empty(); ++number) {
    const auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto place = fmt::format("{}:{}", file.string(), number);
    if (line.size() > kMaxRecordBytes)
      fail_data("{}: the line has {} bytes; at most {} are read", place, line.size(), kMaxRecordBytes);
    auto json = parse(line, place);
    if (!json.is_object()) fail_data("{}: expected a JSON object, got {}", place, json.type_name());
    use({std::move(json), place});
  }
}

Json value_or_null(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? Json() : *found;
}

}  // namespace sluice
