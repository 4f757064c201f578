// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/export.h"

#include <algorithm>
#include <cctype>
#include <set>

#include "sluice/checkpoint/load.h"
#include "sluice/checkpoint/tensor_io.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/formats/json.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// One tensor of the export: made of runs of parameters, or copied from the source.
struct Item {
  TensorInfo info;
  std::vector<Run> runs;
  const ModelFolder::Tensor* copied = nullptr;
};

void write_item(SafetensorsWriter& writer, const Item& item, const std::vector<Parameter*>& parameters) {
  if (item.copied != nullptr) return writer.write(item.copied->bytes());
  for (const auto& run : item.runs) {
    const auto& parameter = *parameters[run.parameter];
    const auto& value = parameter.value;
    SLUICE_CHECK(value.defined() && value.sizes() == parameter.shape,
                 "export: {} has no value of its declared shape {}", parameter.name, shape_text(parameter.shape));
    const auto piece = value.detach().reshape(-1).narrow(0, run.offset, run.elements);
    writer.write(tensor_bytes(piece.to(at::kCPU, scalar_type(item.info.dtype)).contiguous()));
  }
}

void write_weights(const fs::path& path, std::vector<Item> items, const std::vector<Parameter*>& parameters) {
  // Wider dtypes first keep every tensor aligned; readers that map the file then need no copy.
  std::ranges::stable_sort(items, std::greater<>(), [](const Item& item) { return dtype_bytes(item.info.dtype); });
  std::vector<TensorInfo> infos;
  for (const auto& item : items) infos.push_back(item.info);
  SafetensorsWriter writer(path, infos);
  for (const auto& item : items) write_item(writer, item, parameters);
  writer.commit();
}

// Cuts the list where the next tensor would make a shard larger than allowed; a larger tensor is a shard of its own.
std::vector<std::vector<Item>> cut_into_shards(std::vector<Item> items, std::uint64_t max_bytes) {
  std::vector<std::vector<Item>> shards;
  std::uint64_t bytes = 0;
  for (auto& item : items) {
    const auto size = item.info.bytes();
    if (shards.empty() || (bytes + size > max_bytes && bytes > 0)) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += size;
    shards.back().push_back(std::move(item));
  }
  return shards;
}

void write_shards(const fs::path& folder, std::vector<Item> items, const std::vector<Parameter*>& parameters,
                  std::uint64_t max_bytes) {
  auto shards = cut_into_shards(std::move(items), max_bytes);
  if (shards.size() == 1) return write_weights(folder / kWeightsFile, std::move(shards[0]), parameters);
  json weight_map = json::object();
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    for (const auto& item : shards[i]) {
      weight_map[item.info.name] = name;
      total += item.info.bytes();
    }
    write_weights(folder / name, std::move(shards[i]), parameters);
  }
  const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  write_file(folder / kIndexFile, index.dump(2) + "\n");
}

void copy_bytes(const fs::path& from, const fs::path& to) {
  const MappedFile file(from);
  AtomicFile copied(to);
  copied.write(file.bytes());
  copied.commit();
}

// Ids out of `value`, a number, a list of numbers or null.
void add_ids(const json& config, const char* key, std::set<std::int64_t>& ids) {
  const auto value = config.find(key);
  if (value == config.end()) return;
  for (const auto& id : value->is_array() ? *value : json::array({*value})) {
    if (id.is_number_integer()) ids.insert(id.get<std::int64_t>());
  }
}

// The id of the tokenizer's end token, by the tokenizer's own files.
void add_tokenizer_eos(const fs::path& folder, std::set<std::int64_t>& ids) {
  constexpr std::uint64_t kMaxBytes = 200'000'000;
  if (!fs::exists(folder / "tokenizer_config.json") || !fs::exists(folder / "tokenizer.json")) return;
  const auto config = read_json_object(folder / "tokenizer_config.json", kMaxBytes);
  auto eos = config.value("eos_token", json());
  if (eos.is_object()) eos = eos.value("content", json());
  if (!eos.is_string()) return;
  const auto tokenizer = read_json_object(folder / "tokenizer.json", kMaxBytes);
  for (const auto& token : tokenizer.value("added_tokens", json::array())) {
    if (token.is_object() && token.value("content", json()) == eos) add_ids(token, "id", ids);
  }
}

// A sampler stops at any end id that the config or the tokenizer knows.
void write_generation_config(const fs::path& folder, const json& config) {
  std::set<std::int64_t> ids;
  add_ids(config, "eos_token_id", ids);
  add_ids(text_config(config), "eos_token_id", ids);
  add_tokenizer_eos(folder, ids);
  if (ids.empty()) return;
  json generation = {{"eos_token_id", ids.size() == 1 ? json(*ids.begin()) : json(ids)}};
  for (const auto* key : {"bos_token_id", "pad_token_id"}) {
    for (const auto* source : {&config, &text_config(config)}) {
      if (source->contains(key) && !source->at(key).is_null()) generation[key] = source->at(key);
    }
  }
  write_file(folder / kGenerationConfigFile, generation.dump(2) + "\n");
}

// The files beside config and weights from `source` (empty: none), and a generation_config.json in any case.
void copy_companions(const fs::path& source, const fs::path& folder, const json& config) {
  if (!source.empty()) {
    for (const auto& name : companion_files(source)) copy_bytes(source / name, folder / name);
  }
  if (!fs::exists(folder / kGenerationConfigFile)) write_generation_config(folder, config);
}

// The written folder must hold exactly these tensors, in name, shape and dtype.
void verify(const fs::path& folder, const std::vector<TensorInfo>& expected) {
  const auto describe = [](const TensorInfo& info) {
    return fmt::format("{} {} {}", info.name, shape_text(info.shape), dtype_name(info.dtype));
  };
  std::set<std::string> missing, found;
  for (const auto& info : expected) missing.insert(describe(info));
  const ModelFolder written(folder);
  for (const auto& tensor : written.tensors()) {
    if (missing.erase(describe(tensor.info())) == 0) found.insert(describe(tensor.info()));
  }
  SLUICE_CHECK(
      missing.empty() && found.empty() && written.unlisted().empty(),
      "export: the written folder differs from its source: {} tensors missing (first: {}), {} too many (first: {})",
      missing.size(), missing.empty() ? "none" : *missing.begin(), found.size(),
      found.empty() ? "none" : *found.begin());
}

}  // namespace

void export_model(const fs::path& out, const std::vector<Parameter*>& parameters, const ModelFolder& source,
                  const WeightRules& rules, const ExportOptions& options) {
  const auto map = map_folder(source, parameters, rules);
  std::vector<Item> items;
  std::vector<TensorInfo> expected;
  for (std::size_t i = 0; i < map.size(); ++i) {
    const auto& mapped = map[i];
    if (!mapped.exported) continue;
    expected.push_back(mapped.disk);
    items.push_back({mapped.disk, mapped.runs, mapped.runs.empty() ? &source.tensors()[i] : nullptr});
  }
  AtomicFolder folder(out);
  write_shards(folder.path(), std::move(items), parameters, options.max_shard_bytes);
  if (options.config) {
    write_file(folder.path() / kConfigFile, *options.config);
  } else {
    copy_bytes(source.path() / kConfigFile, folder.path() / kConfigFile);
  }
  copy_companions(source.path(), folder.path(), source.config());
  verify(folder.path(), expected);
  folder.commit();
}

void export_fresh_model(const fs::path& out, const std::vector<Parameter*>& parameters, nlohmann::ordered_json config,
                        const WeightRules& rules, at::ScalarType dtype, const std::optional<fs::path>& companions,
                        const ExportOptions& options) {
  const auto wanted = wanted_tensors(parameters);
  std::vector<Dtype> dtypes;
  for (const auto* parameter : parameters) dtypes.push_back(stored_dtype(held_dtype(*parameter, dtype)));
  std::vector<Item> items;
  std::vector<TensorInfo> expected;
  for (auto& tensor : fresh_tensors(wanted, dtypes, rules)) {
    expected.push_back(tensor.disk);
    items.push_back({.info = tensor.disk, .runs = std::move(tensor.runs)});
  }
  std::string name = at::toString(dtype);  // "BFloat16"; config.json says "bfloat16"
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  config.erase("torch_dtype");  // the older name of the same key
  config["dtype"] = dtype == at::kFloat ? "float32" : name;
  AtomicFolder folder(out);
  write_shards(folder.path(), std::move(items), parameters, options.max_shard_bytes);
  write_file(folder.path() / kConfigFile, config.dump(2) + "\n");
  copy_companions(companions.value_or(fs::path()), folder.path(), json(config));
  verify(folder.path(), expected);
  folder.commit();
}

}  // namespace sluice
