// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/export.h"

#include <algorithm>
#include <cctype>
#include <set>

#include "sluice/checkpoint/fp8.h"
#include "sluice/checkpoint/load.h"
#include "sluice/checkpoint/tensor_io.h"
#include "sluice/checkpoint/whole_values.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/wildcard.h"
#include "sluice/formats/json.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// One tensor of the export: made of runs of parameters, or copied from the source.
struct Item {
  enum class Form { kPlain, kFp8, kFp8Scale };
  TensorInfo info;
  std::vector<Run> runs = {};
  const ModelFolder::Tensor* copied = nullptr;
  Form form = Form::kPlain;
  std::vector<std::int64_t> weight_shape = {};  // of the weight that a scale belongs to
};

// What items are made of.
struct Values {
  const std::vector<Parameter*>& parameters;
  const ModelFolder* source;  // null: none
  WholeValues& whole;

  Tensor of(const Run& run) const {
    return whole.of(*parameters[run.parameter]).reshape(-1).narrow(0, run.offset, run.elements);
  }
};

void write_fp8(SafetensorsWriter& writer, const Item& item, const Values& values) {
  std::vector<Tensor> runs;
  for (const auto& run : item.runs) runs.push_back(values.of(run).to(kFloat));
  const bool is_scale = item.form == Item::Form::kFp8Scale;
  const auto weight = at::cat(runs).view(is_scale ? item.weight_shape : item.info.shape);
  const auto block = values.source->fp8_block();
  const auto scales = fp8_scales(weight, block);
  writer.write(tensor_bytes((is_scale ? scales : fp8_quantized(weight, scales, block)).contiguous()));
}

void write_copied(SafetensorsWriter& writer, const Item& item, const Values& values) {
  const auto& tensor = *item.copied;
  if (item.form == Item::Form::kFp8Scale) return writer.write(tensor.scale_file->bytes(*tensor.scale));
  if (item.info.dtype == tensor.info().dtype) return writer.write(tensor.bytes());
  writer.write(tensor_bytes(read_tensor(*values.source, tensor, scalar_type(item.info.dtype)).contiguous()));
}

void write_item(SafetensorsWriter& writer, const Item& item, const Values& values) {
  if (item.copied != nullptr) return write_copied(writer, item, values);
  if (item.form != Item::Form::kPlain) return write_fp8(writer, item, values);
  for (const auto& run : item.runs) {
    writer.write(tensor_bytes(values.of(run).to(scalar_type(item.info.dtype)).contiguous()));
  }
}

// What a rank that does not write adds to an item: its pieces.
void give_pieces(const Item& item, const Values& values) {
  for (const auto& run : item.runs) values.whole.of(*values.parameters[run.parameter]);
}

void write_weights(const fs::path& path, std::vector<Item> items, const Values& values) {
  // Wider dtypes first keep every tensor aligned; readers that map the file then need no copy.
  std::ranges::stable_sort(items, std::greater<>(), [](const Item& item) { return dtype_bytes(item.info.dtype); });
  std::vector<TensorInfo> infos;
  if (!values.whole.is_writer()) {
    for (const auto& item : items) give_pieces(item, values);
    return;
  }
  for (const auto& item : items) infos.push_back(item.info);
  SafetensorsWriter writer(path, infos);
  for (const auto& item : items) write_item(writer, item, values);
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

void write_shards(const fs::path& folder, std::vector<Item> items, const Values& values, std::uint64_t max_bytes) {
  auto shards = cut_into_shards(std::move(items), max_bytes);
  if (shards.size() == 1) return write_weights(folder / kWeightsFile, std::move(shards[0]), values);
  json weight_map = json::object();
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    for (const auto& item : shards[i]) {
      weight_map[item.info.name] = name;
      total += item.info.bytes();
    }
    write_weights(folder / name, std::move(shards[i]), values);
  }
  if (!values.whole.is_writer()) return;
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

// The written folder must hold exactly these tensors, in name, shape and dtype. Scales are with what they scale.
void verify(const fs::path& folder, const std::vector<Item>& items) {
  const auto describe = [](const TensorInfo& info) {
    return fmt::format("{} {} {}", info.name, shape_text(info.shape), dtype_name(info.dtype));
  };
  std::set<std::string> missing, found;
  for (const auto& item : items) {
    if (item.form != Item::Form::kFp8Scale) missing.insert(describe(item.info));
  }
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

// A tensor of the source that no parameter changes.
void add_copied(std::vector<Item>& items, const MappedTensor& mapped, const ModelFolder::Tensor& from, bool fp8) {
  if (from.scale == nullptr || !fp8) {
    items.push_back({.info = mapped.disk, .copied = &from});
    return;
  }
  items.push_back({.info = from.info(), .copied = &from});
  // The shards of a table share a scale, which is written once.
  const auto is_it = [&](const Item& item) { return item.info.name == from.scale->info.name; };
  if (std::ranges::any_of(items, is_it)) return;
  items.push_back({.info = from.scale->info, .copied = &from, .form = Item::Form::kFp8Scale});
}

bool becomes_fp8(const TensorInfo& info, const WeightRules& rules) {
  return info.shape.size() == 2 &&
         std::ranges::any_of(rules.fp8, [&](const auto& pattern) { return matches(pattern, info.name); });
}

void add_fp8(std::vector<Item>& items, const MappedTensor& mapped, const WeightRules& rules, BlockSize block) {
  if (!becomes_fp8(mapped.disk, rules)) {
    items.push_back({.info = mapped.disk, .runs = mapped.runs});
    return;
  }
  const auto& [name, dtype, shape] = mapped.disk;
  items.push_back({.info = {name, Dtype::kF8E4M3, shape}, .runs = mapped.runs, .form = Item::Form::kFp8});
  items.push_back({.info = {name + std::string(kScaleSuffix),
                            Dtype::kBF16,
                            {blocks_of(shape[0], block.rows), blocks_of(shape[1], block.columns)}},
                   .runs = mapped.runs,
                   .form = Item::Form::kFp8Scale,
                   .weight_shape = shape});
}

std::vector<Item> items_of(const ModelFolder& source, const std::vector<Parameter*>& parameters,
                           const WeightRules& rules, const ExportOptions& options) {
  const auto map = map_folder(source, parameters, rules);
  const auto wanted = wanted_tensors(parameters);
  std::vector<Item> items;
  for (std::size_t i = 0; i < map.size(); ++i) {
    const auto& mapped = map[i];
    if (!mapped.exported) continue;
    if (mapped.runs.empty() || parameters[mapped.runs[0].parameter]->as_stored) {
      add_copied(items, mapped, source.tensors()[i], options.fp8);
    } else if (!options.fp8) {
      items.push_back({.info = mapped.disk, .runs = mapped.runs});
    } else if (const auto pieces = in_pieces(mapped, wanted, rules); !pieces.empty()) {
      for (const auto& piece : pieces) add_fp8(items, piece, rules, source.fp8_block());
    } else {
      add_fp8(items, mapped, rules, source.fp8_block());
    }
  }
  return items;
}

// Those of parameters that the source does not have, under the prefix that it uses. Their runs count on from `first`.
void add_fresh(std::vector<Item>& items, const std::vector<Parameter*>& fresh, std::size_t first,
               const ModelFolder& source, const WeightRules& rules) {
  std::vector<Dtype> dtypes;
  for (const auto* parameter : fresh) dtypes.push_back(stored_dtype(parameter->value.scalar_type()));
  const WeightRules::Prefix* prefix = nullptr;
  for (const auto& tensor : source.tensors()) {
    if (const auto* found = prefix_of(tensor.info().name, rules)) prefix = found;
  }
  for (auto& tensor : fresh_tensors(wanted_tensors(fresh), dtypes, rules)) {
    tensor.disk.name = disk_name(tensor.disk.name, prefix);
    for (auto& run : tensor.runs) run.parameter += first;
    items.push_back({.info = tensor.disk, .runs = std::move(tensor.runs)});
  }
}

// config.json of the export; the source's own, byte for byte, where nothing is or was FP8.
std::string config_of(const ModelFolder& source, const std::vector<Item>& items, const ExportOptions& options) {
  auto text = options.config ? *options.config : read_file(source.path() / kConfigFile, kMaxConfigBytes);
  const std::string key(kQuantizationKey);
  if (!options.fp8 && !source.config().contains(key)) return text;
  auto config = nlohmann::ordered_json::parse(text);
  auto quantization = config.value(key, nlohmann::ordered_json::object());
  config.erase(key);
  if (options.fp8) {
    std::set<std::string> plain;
    for (const auto& [info, runs, copied, form, shape] : items) {
      if (form != Item::Form::kPlain || info.dtype == Dtype::kF8E4M3) continue;
      constexpr std::string_view kWeight = ".weight";
      plain.insert(info.name.ends_with(kWeight) ? info.name.substr(0, info.name.size() - kWeight.size()) : info.name);
    }
    const auto block = source.fp8_block();
    quantization.update({{"quant_method", "fp8"},
                         {"activation_scheme", "dynamic"},
                         {"fmt", "e4m3"},
                         {"weight_block_size", {block.rows, block.columns}},
                         {"modules_to_not_convert", plain}});
    config[key] = quantization;
  }
  return config.dump(2) + "\n";
}

}  // namespace

void export_model(const fs::path& out, const std::vector<Parameter*>& parameters, const ModelFolder& source,
                  const WeightRules& rules, const ExportOptions& options, const Mesh& mesh) {
  auto items = items_of(source, parameters, rules, options);
  auto all = parameters;
  all.insert(all.end(), options.fresh.begin(), options.fresh.end());
  add_fresh(items, options.fresh, parameters.size(), source, rules);
  WholeValues whole(mesh);
  const Values values{.parameters = all, .source = &source, .whole = whole};
  if (!whole.is_writer()) return write_shards(out, items, values, options.max_shard_bytes);
  AtomicFolder folder(out);
  write_shards(folder.path(), items, values, options.max_shard_bytes);
  write_file(folder.path() / kConfigFile, config_of(source, items, options));
  copy_companions(source.path(), folder.path(), source.config());
  verify(folder.path(), items);
  folder.commit();
}

void export_fresh_model(const fs::path& out, const std::vector<Parameter*>& parameters, nlohmann::ordered_json config,
                        const WeightRules& rules, at::ScalarType dtype, const std::optional<fs::path>& companions,
                        const ExportOptions& options) {
  const auto wanted = wanted_tensors(parameters);
  std::vector<Dtype> dtypes;
  for (const auto* parameter : parameters) dtypes.push_back(stored_dtype(held_dtype(*parameter, dtype)));
  std::vector<Item> items;
  for (auto& tensor : fresh_tensors(wanted, dtypes, rules)) {
    items.push_back({.info = tensor.disk, .runs = std::move(tensor.runs)});
  }
  std::string name = at::toString(dtype);  // "BFloat16"; config.json says "bfloat16"
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  config.erase("torch_dtype");  // the older name of the same key
  config["dtype"] = dtype == at::kFloat ? "float32" : name;
  AtomicFolder folder(out);
  WholeValues whole;
  write_shards(folder.path(), items, {.parameters = parameters, .source = nullptr, .whole = whole},
               options.max_shard_bytes);
  write_file(folder.path() / kConfigFile, config.dump(2) + "\n");
  copy_companions(companions.value_or(fs::path()), folder.path(), json(config));
  verify(folder.path(), items);
  folder.commit();
}

}  // namespace sluice
