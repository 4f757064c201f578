// SPDX-License-Identifier: Apache-2.0
// A model folder as Hugging Face lays it out: config.json, the weights in one model.safetensors or in shards named by
// model.safetensors.index.json, and the tokenizer's files beside them. Opening one maps the weights and checks that
// index, shards and headers agree; no weight is read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/formats/safetensors.h"

namespace sluice {

inline constexpr std::string_view kConfigFile = "config.json";
inline constexpr std::string_view kWeightsFile = "model.safetensors";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";
inline constexpr std::string_view kGenerationConfigFile = "generation_config.json";

// Of a training run: folders in its own, and the file that makes a folder a training checkpoint.
inline constexpr std::string_view kExportFolder = "export", kCheckpointsFolder = "checkpoints";
inline constexpr std::string_view kMetaFile = "meta.json";

inline constexpr std::uint64_t kMaxConfigBytes = 64'000'000;  // of each of the JSON files but the index

// config.json of a folder. Data error if it is missing, no object, or larger than kMaxConfigBytes.
nlohmann::json read_model_config(const std::filesystem::path& folder);

// What to give instead of a folder that is no model in Hugging Face's form, in sentences: it may be that of an adapter
// or a training run, or hold what other programs write. Empty where nothing is known of it.
std::string advice_about(const std::filesystem::path& folder);

// The part that describes the language model: `text_config` of a multimodal config, otherwise the config itself.
const nlohmann::json& text_config(const nlohmann::json& config);

// model.safetensors.index.json: which shard holds a tensor. `file` names the text in errors. Data error unless every
// shard is a plain file name, so that no index reaches outside its folder.
std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file);

// Files that belong to a model beside config and weights: tokenizer, chat template, processors, generation config,
// licence. Names, sorted.
std::vector<std::string> companion_files(const std::filesystem::path& folder);

// Rows and columns of a weight that share a scale.
struct BlockSize {
  std::int64_t rows = 128, columns = 128;
};
constexpr std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

inline constexpr std::string_view kQuantizationKey = "quantization_config";  // of config.json
inline constexpr std::string_view kScaleSuffix = "_scale_inv";               // of an FP8 tensor's name: its scales

class ModelFolder {
 public:
  struct Tensor {
    std::shared_ptr<const SafetensorsFile> file;
    const StoredTensor* stored;  // owned by file
    std::shared_ptr<const SafetensorsFile> scale_file = {};
    const StoredTensor* scale = nullptr;  // of an FP8 tensor: its values are this times what is stored
    const TensorInfo& info() const { return stored->info; }
    std::span<std::byte> bytes() const { return file->bytes(*stored); }
  };

  // Data error if the config, the index, a shard or a tensor that the index names is missing or damaged, if the weights
  // are marked as laid out for another program or framework, or the scales of an FP8 tensor do not fit it.
  explicit ModelFolder(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const nlohmann::json& config() const { return config_; }

  // Sorted by name; the scales of an FP8 tensor are with it. They are either one for each block of its last two
  // dimensions, named after it with "_scale_inv", or one number for all of it: "NAME.weight_scale" for "NAME.weight"
  // and for the shards of a table, "NAME.shard_3.weight".
  const std::vector<Tensor>& tensors() const { return tensors_; }
  BlockSize fp8_block() const { return fp8_block_; }  // weight_block_size of quantization_config

  // Tensors that lie in a shard but that the index does not give to it: they are not read. "NAME in FILE".
  const std::vector<std::string>& unlisted() const { return unlisted_; }

 private:
  void open_single_file();
  void open_shards();
  void pair_scales();
  void refuse_layout_markers() const;

  std::filesystem::path path_;
  nlohmann::json config_;
  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  std::vector<Tensor> tensors_;
  std::vector<std::string> unlisted_;
  BlockSize fp8_block_;
};

// Key under which some trainers mark weights that are permuted or fused for their own use. Neither read nor written.
inline constexpr std::string_view kLayoutMarker = "weight_layout_version";

}  // namespace sluice
