// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/model_folder.h"

#include <algorithm>
#include <array>
#include <set>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/wildcard.h"
#include "sluice/formats/json.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::uint64_t kMaxIndexBytes = 200'000'000;  // a million tensors, 200 bytes each

constexpr std::array<std::string_view, 14> kCompanions = {"tokenizer*",         "vocab.json",
                                                          "merges.txt",         "special_tokens_map.json",
                                                          "added_tokens.json",  "*.tiktoken",
                                                          "tiktoken.model",     "generation_config.json",
                                                          "chat_template*",     "*processor_config.json",
                                                          "LICENSE*",           "NOTICE*",
                                                          "configuration_*.py", "*tokenization_*.py"};

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

// Of what lies in a folder, for advice: none where it may not be listed.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  return names;
}

// What to do about files in a folder that are no model in Hugging Face's form; empty if there are none.
std::string about_other_files(const fs::path& folder) {
  for (const auto& name : names_in(folder)) {
    if (matches("pytorch_model*.bin", name)) {
      return "It holds pytorch_model.bin; save it with safe_serialization=True in transformers first.";
    }
    if (matches("*.gguf", name)) return "It holds a GGUF file; give the folder that it was converted from.";
    if (matches("adapter_model*", name)) {
      return fmt::format(
          "It holds a LoRA adapter; give the folder of its base model, and --adapter {} where the "
          "command has that.",
          folder.string());
    }
    if (matches("*.distcp", name) || name == "latest_checkpointed_iteration.txt") {
      return "It holds a training checkpoint of Megatron or PyTorch; convert it to Hugging Face's layout with the "
             "program that wrote it.";
    }
  }
  return "";
}

// What to do about the folder of a training run, or of a checkpoint of one; empty if it is neither.
std::string about_training_run(const fs::path& folder) {
  const auto exported = folder / kExportFolder;
  if (fs::exists(exported / kConfigFile)) {
    return fmt::format("It is the folder of a training run; give the model that the run exported: {}",
                       exported.string());
  }
  if (fs::is_directory(exported)) {
    if (const auto advice = about_other_files(exported); !advice.empty()) {
      return fmt::format("It is the folder of a training run, whose export is {}. {}", exported.string(), advice);
    }
  }
  if (fs::exists(folder / kMetaFile) || fs::exists(folder / kCheckpointsFolder)) {
    return fmt::format("It holds training checkpoints; `sluice export {} --out DIR` makes a model folder.",
                       folder.string());
  }
  return "";
}

// What to say when a folder holds no weights that can be read.
std::string what_is_there_instead(const fs::path& folder) {
  if (auto advice = about_other_files(folder); !advice.empty()) return advice;
  for (const auto& name : names_in(folder)) {
    if (matches("*.safetensors", name)) return fmt::format("Its {} has no index; download that too.", name);
  }
  return "Download the weights into it.";
}

// weight_block_size of a config's quantization_config; 128 x 128 where there is none.
BlockSize read_block_size(const json& config, const std::string& where) {
  const auto quantization = config.value(kQuantizationKey, json());
  const auto sizes = quantization.is_object() ? quantization.value("weight_block_size", json()) : json();
  if (sizes.is_null()) return {};
  constexpr std::int64_t kMost = 1 << 20;
  const auto is_size = [](const json& size) {
    return size.is_number_integer() && size.get<std::int64_t>() > 0 && size.get<std::int64_t>() <= kMost;
  };
  if (!sizes.is_array() || sizes.size() != 2 || !is_size(sizes[0]) || !is_size(sizes[1])) {
    fail_data("{}.{}.weight_block_size: expected two sizes from 1 to {}, found {}", where, kQuantizationKey, kMost,
              printable(sizes.dump().substr(0, 80)));
  }
  return {sizes[0].get<std::int64_t>(), sizes[1].get<std::int64_t>()};
}

std::vector<std::int64_t> scale_shape(std::vector<std::int64_t> shape, BlockSize block) {
  if (shape.size() < 2) return {1};
  auto &rows = shape[shape.size() - 2], &columns = shape[shape.size() - 1];
  rows = blocks_of(rows, block.rows);
  columns = blocks_of(columns, block.columns);
  return shape;
}

// "a.b.weight" and "a.b.shard_3.weight" to "a.b.weight_scale"; empty for another name.
std::string one_scale_name(std::string_view name) {
  constexpr std::string_view kWeight = ".weight", kShard = ".shard_";
  if (!name.ends_with(kWeight)) return "";
  name.remove_suffix(kWeight.size());
  const auto dot = name.rfind('.');
  if (dot != std::string_view::npos && name.substr(dot).starts_with(kShard)) name = name.substr(0, dot);
  return std::string(name) + ".weight_scale";
}

}  // namespace

std::string advice_about(const fs::path& folder) {
  if (!fs::is_directory(folder)) return "";
  auto advice = about_training_run(folder);
  if (advice.empty()) advice = about_other_files(folder);
  return advice;
}

json read_model_config(const fs::path& folder) {
  if (!fs::is_directory(folder))
    fail_data("{}: not a folder; a model is a folder with config.json in it", folder.string());
  const auto path = folder / kConfigFile;
  if (!fs::exists(path)) {
    const auto advice = advice_about(folder);
    fail_data("{}: no {} in this folder{}", folder.string(), kConfigFile,
              advice.empty() ? "; is it a model folder?" : ". " + advice);
  }
  return read_json_object(path, kMaxConfigBytes);
}

const json& text_config(const json& config) {
  const auto nested = config.find("text_config");
  return nested != config.end() && nested->is_object() ? *nested : config;
}

std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file) {
  const auto parsed = parse_json(text, file);
  const auto map = parsed.is_object() ? parsed.find("weight_map") : parsed.end();
  if (map == parsed.end() || !map->is_object())
    fail_data("{}: expected an object with a weight_map of {{tensor: file}}", file);
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : map->items()) {
    if (!shard.is_string() || !is_plain_file_name(shard.get_ref<const std::string&>())) {
      fail_data("{}: tensor \"{}\" must be given to a file of the same folder, found {}", file, printable(name),
                printable(shard.dump()));
    }
    shards.emplace(name, shard.get<std::string>());
  }
  return shards;
}

std::vector<std::string> companion_files(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const auto fits = [&](std::string_view pattern) { return matches(pattern, name); };
    if (entry.is_regular_file() && std::ranges::any_of(kCompanions, fits)) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

ModelFolder::ModelFolder(fs::path path) : path_(std::move(path)), config_(read_model_config(path_)) {
  if (fs::exists(path_ / kIndexFile)) {
    open_shards();
  } else {
    open_single_file();
  }
  std::ranges::sort(tensors_, {}, [](const Tensor& tensor) -> const std::string& { return tensor.info().name; });
  refuse_layout_markers();
  pair_scales();
}

void ModelFolder::open_single_file() {
  const auto path = path_ / kWeightsFile;
  if (!fs::exists(path)) {
    fail_data("{}: neither {} nor {} in this folder. {}", path_.string(), kWeightsFile, kIndexFile,
              what_is_there_instead(path_));
  }
  files_.push_back(std::make_shared<SafetensorsFile>(path));
  for (const auto& stored : files_[0]->tensors()) tensors_.push_back({files_[0], &stored});
}

void ModelFolder::open_shards() {
  const auto index_path = path_ / kIndexFile;
  const auto shard_of = parse_index(read_file(index_path, kMaxIndexBytes), index_path.string());
  if (shard_of.empty()) fail_data("{}: names no tensor. Download it again.", index_path.string());

  std::map<std::string, std::shared_ptr<const SafetensorsFile>> shards;
  for (const auto& [name, shard] : shard_of) {
    if (shards.contains(shard)) continue;
    if (!fs::exists(path_ / shard)) {
      const auto held =
          std::ranges::count_if(shard_of, [&shard = shard](const auto& entry) { return entry.second == shard; });
      fail_data("{}: {} is missing; {} gives it {} tensors (first: {}). Download it again.", path_.string(), shard,
                kIndexFile, held, printable(name));
    }
    shards.emplace(shard, std::make_shared<SafetensorsFile>(path_ / shard));
  }
  for (const auto& [name, shard] : shard_of) {
    const auto& file = shards.at(shard);
    const auto* stored = file->find(name);
    if (stored == nullptr) {
      fail_data("{}: tensor \"{}\" is not in {}, though {} says so. Download both again.", path_.string(),
                printable(name), shard, kIndexFile);
    }
    tensors_.push_back({file, stored});
  }
  for (const auto& [shard, file] : shards) {
    files_.push_back(file);
    for (const auto& stored : file->tensors()) {
      const auto given = shard_of.find(stored.info.name);
      if (given == shard_of.end() || given->second != shard) {
        unlisted_.push_back(fmt::format("{} in {}", printable(stored.info.name), shard));
      }
    }
  }
}

void ModelFolder::pair_scales() {
  fp8_block_ = read_block_size(config_, (path_ / kConfigFile).string());
  std::set<const StoredTensor*> scales;
  const auto find = [&](const std::string& name) {
    const auto found = std::ranges::lower_bound(
        tensors_, name, {}, [](const Tensor& tensor) -> const std::string& { return tensor.info().name; });
    return found == tensors_.end() || found->info().name != name ? nullptr : &*found;
  };
  for (auto& tensor : tensors_) {
    if (tensor.info().dtype != Dtype::kF8E4M3) continue;
    const auto* by_block = find(tensor.info().name + std::string(kScaleSuffix));
    const auto* scale = by_block != nullptr ? by_block : find(one_scale_name(tensor.info().name));
    if (scale == nullptr) continue;
    const auto& found = scale->info();
    const auto expected = scale_shape(tensor.info().shape, fp8_block_);
    const bool fits = by_block != nullptr ? found.shape == expected : found.elements() == 1;
    if (!fits || !is_plain_float(found.dtype)) {
      fail_data("{}: {}: expected {} of a float dtype, one scale for each block of {} x {} of {}, found {} {}",
                path_.string(), printable(found.name), by_block != nullptr ? shape_text(expected) : "[1]",
                fp8_block_.rows, fp8_block_.columns, shape_text(tensor.info().shape), shape_text(found.shape),
                dtype_name(found.dtype));
    }
    tensor.scale_file = scale->file;
    tensor.scale = scale->stored;
    scales.insert(scale->stored);
  }
  std::erase_if(tensors_, [&](const Tensor& tensor) { return scales.contains(tensor.stored); });
}

void ModelFolder::refuse_layout_markers() const {
  const auto refuse = [&](const std::string& where) {
    fail_data(
        "{}: {} is marked with {}: its weights are laid out for another program, not as the model's family publishes "
        "them. Export it again with that program's converter.",
        path_.string(), where, kLayoutMarker);
  };
  if (config_.contains(kLayoutMarker) || text_config(config_).contains(kLayoutMarker)) refuse(std::string(kConfigFile));
  for (const auto& file : files_) {
    const auto name = file->path().filename().string();
    if (file->metadata().contains(std::string(kLayoutMarker))) refuse(name);
    const auto format = file->metadata().find("format");
    if (format == file->metadata().end() || format->second == "pt") continue;
    fail_data(
        "{}: {} says format \"{}\" in its header, expected \"pt\": other frameworks transpose weights or shift those "
        "of norms. Give the folder that it was converted from.",
        path_.string(), name, printable(format->second));
  }
  for (const auto& tensor : tensors_) {
    if (tensor.info().name.ends_with(kLayoutMarker)) refuse("tensor " + printable(tensor.info().name));
  }
}

}  // namespace sluice
