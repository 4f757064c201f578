// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/stop.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/formats/json.h"
#include "sluice/formats/model_folder.h"

namespace sluice {
namespace {

void add_ids(const nlohmann::json& config, const std::string& where, std::set<TokenId>& ids) {
  const auto found = config.find("eos_token_id");
  if (found == config.end() || found->is_null()) return;
  const auto list = found->is_array() ? *found : nlohmann::json::array({*found});
  for (const auto& id : list) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<TokenId>::max()) {
      fail_data("{}: eos_token_id: expected a token id or a list of them, found {}", where, printable(found->dump()));
    }
    ids.insert(id.get<TokenId>());
  }
}

}  // namespace

std::vector<TokenId> stop_ids(const std::filesystem::path& model_folder, const std::optional<Tokenizer>& tokenizer) {
  std::set<TokenId> ids;
  const auto config = read_model_config(model_folder);
  const auto config_path = (model_folder / kConfigFile).string();
  add_ids(config, config_path, ids);
  add_ids(text_config(config), config_path, ids);
  if (const auto path = model_folder / kGenerationConfigFile; std::filesystem::exists(path)) {
    add_ids(read_json_object(path, kMaxConfigBytes), path.string(), ids);
  }
  if (tokenizer && tokenizer->eos_id()) ids.insert(*tokenizer->eos_id());
  return {ids.begin(), ids.end()};
}

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  std::erase(strings_, std::string());
}

std::string StopStrings::push(std::string_view piece) {
  if (found_) return {};
  held_ += piece;
  auto begin = std::string::npos;
  for (const auto& string : strings_) begin = std::min(begin, held_.find(string));
  if (begin != std::string::npos) {
    found_ = true;
    return std::exchange(held_, {}).substr(0, begin);
  }
  // The longest end of the text that begins a stop string stays.
  std::size_t keep = 0;
  for (const auto& string : strings_) {
    for (auto length = std::min(string.size() - 1, held_.size()); length > keep; --length) {
      if (held_.ends_with(std::string_view(string).substr(0, length))) keep = length;
    }
  }
  auto released = held_.substr(0, held_.size() - keep);
  held_.erase(0, released.size());
  return released;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

}  // namespace sluice
