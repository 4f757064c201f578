// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/model_folder.h"

#include <algorithm>
#include <array>
#include <set>

#include "sluice/core/error.h"
#include "sluice/core/wildcard.h"
#include "sluice/core/files.h"
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

// What to say when a folder holds no weights that can be read.
std::string what_is_there_instead(const fs::path& folder) {
  std::string other;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (matches("pytorch_model*.bin", name)) {
      return "It holds pytorch_model.bin; save it with safe_serialization=True in transformers first.";
    }
    if (matches("*.gguf", name)) return "It holds a GGUF file; give the folder that it was converted from.";
    if (matches("adapter_model*", name)) return "It holds a LoRA adapter; give the folder of its base model.";
    if (matches("*.safetensors", name)) other = name;
  }
  return other.empty() ? "Download the weights into it."
                       : fmt::format("Its {} has no index; download that too.", other);
}

}  // namespace

json read_model_config(const fs::path& folder) {
  if (!fs::is_directory(folder))
    fail_data("{}: not a folder; a model is a folder with config.json in it", folder.string());
  const auto path = folder / kConfigFile;
  if (!fs::exists(path)) fail_data("{}: no {} in this folder; is it a model folder?", folder.string(), kConfigFile);
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

void ModelFolder::refuse_layout_markers() const {
  const auto refuse = [&](const std::string& where) {
    fail_data(
        "{}: {} is marked with {}: its weights are laid out for another program, not as the model's family publishes "
        "them. Export it again with that program's converter.",
        path_.string(), where, kLayoutMarker);
  };
  if (config_.contains(kLayoutMarker) || text_config(config_).contains(kLayoutMarker)) refuse(std::string(kConfigFile));
  for (const auto& file : files_) {
    if (file->metadata().contains(std::string(kLayoutMarker))) refuse(file->path().filename().string());
  }
  for (const auto& tensor : tensors_) {
    if (tensor.info().name.ends_with(kLayoutMarker)) refuse("tensor " + printable(tensor.info().name));
  }
}

}  // namespace sluice
