// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/json.h"

#include <algorithm>
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

// Builds the value from the parser's events. The library's own callback parser looks through all earlier members
// whenever an object closes: minutes for a header of 75,000 tensors.
class Builder : public json::json_sax_t {
 public:
  Builder(std::string_view text, const std::string& file) : text_(text), file_(file) {}
  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(json::binary_t& value) override { return add(std::move(value)); }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    const auto [place, is_new] = open_.back()->get_ref<json::object_t&>().try_emplace(name);
    if (!is_new) fail_data("{}: \"{}\" stands twice in one object", file_, printable(name));
    member_ = &place->second;
    return true;
  }

  // The library's message repeats the offending text; the position is what a person needs.
  bool parse_error(std::size_t position, const std::string&, const json::exception& error) override {
    const auto where = line_and_column(text_, position == 0 ? 0 : position - 1);
    fail_data("{}:{}: {}", file_, where,
              dynamic_cast<const json::out_of_range*>(&error) ? "a number is too large" : "not valid JSON");
  }

 private:
  // Puts a value where it belongs: the whole, the next of an array, or the member whose name came last.
  template <typename Value>
  json* place(Value&& value) {
    auto* target = &root_;
    if (!open_.empty()) target = open_.back()->is_array() ? &open_.back()->emplace_back() : member_;
    *target = std::forward<Value>(value);
    return target;
  }
  template <typename Value>
  bool add(Value&& value) {
    place(std::forward<Value>(value));
    return true;
  }
  bool open(json container) {
    if (open_.size() >= kMaxJsonDepth) fail_data("{}: nests deeper than {} levels", file_, kMaxJsonDepth);
    open_.push_back(place(std::move(container)));  // stays where it is while it is open: only it grows
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& file_;
  json root_;
  std::vector<json*> open_;  // outermost first
  json* member_ = nullptr;
};

}  // namespace

json parse_json(std::string_view text, const std::string& file) {
  Builder builder(text, file);
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
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
