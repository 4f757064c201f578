// SPDX-License-Identifier: Apache-2.0
// A model folder from a model's parameters, as transformers, vLLM, SGLang and llama.cpp's converter read it. The folder
// appears whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/formats/model_folder.h"
#include "sluice/formats/weight_map.h"
#include "sluice/layers/parameter.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

struct ExportOptions {
  std::uint64_t max_shard_bytes = 5'000'000'000;  // one model.safetensors if all fits, shards and an index otherwise
  std::optional<std::string> config = {};         // config.json instead of the source's
  bool fp8 = false;                               // the weights that the rules name for it in FP8 (checkpoint/fp8.h)
  std::vector<Parameter*> fresh = {};             // not of the source: written beside the rest, as a new model's
};

// Writes what `source` holds with the parameters' present values: each tensor under its source name, shape and dtype;
// those that were set aside, and tables held as stored, are copied, but for a head that repeats the embedding.
// config.json and the companion files are copied byte for byte.
// A rank of a mesh has pieces of the parameters; all ranks call it, and rank 0 writes, putting together one parameter
// after another.
// FP8 of the source becomes bfloat16, and config.json loses its quantization_config. With `fp8` it stays, and weights
// become FP8, experts one by one; config.json says so, and names every module that is left out. The set of tensors is
// compared with the source before the folder is put in place. Usage error if `out` exists and is not empty; data error
// if the source does not fit the parameters.
void export_model(const std::filesystem::path& out, const std::vector<Parameter*>& parameters,
                  const ModelFolder& source, const WeightRules& rules, const ExportOptions& options = {},
                  const Mesh& mesh = one_process());

// Writes a model that has no source: parameters in `dtype` unless theirs is fixed, named as the rules write a fresh
// model. `config` becomes config.json, with "dtype" set. The tokenizer and whatever else belongs to a model is copied
// from the folder `companions`, if there is one.
void export_fresh_model(const std::filesystem::path& out, const std::vector<Parameter*>& parameters,
                        nlohmann::ordered_json config, const WeightRules& rules, at::ScalarType dtype,
                        const std::optional<std::filesystem::path>& companions = {}, const ExportOptions& options = {});

}  // namespace sluice
