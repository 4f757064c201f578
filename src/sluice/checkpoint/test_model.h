// SPDX-License-Identifier: Apache-2.0
// For tests: a model of four parameters, the rules of its family, and folders that hold it.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sluice/checkpoint/load.h"
#include "sluice/checkpoint/tensor_io.h"
#include "sluice/formats/test_files.h"

namespace sluice {

inline const WeightRules kTestRules{
    .prefixes = {{"model.language_model.", "model."}},
    .aside = {{"model.visual.*", "vision tower"},
              {"mtp.*", "MTP block"},
              {"lm_head.weight", "tied to the embedding", false}},
    .pieces = {{"experts.gate_up_proj", {"experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"}, true, true},
               {"experts.down_proj", {"experts.{}.down_proj.weight"}, true, true}}};

struct TestModel {
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<Parameter*> parameters;

  TestModel() {
    add("model.embed_tokens.weight", {8, 4}, std::nullopt);
    add("model.layers.0.linear_attn.A_log", {3}, kFloat);
    add("model.layers.0.mlp.experts.gate_up_proj", {2, 6, 4}, std::nullopt);
    add("model.layers.0.mlp.experts.down_proj", {2, 4, 3}, std::nullopt);
  }
  void add(std::string name, std::vector<std::int64_t> shape, std::optional<at::ScalarType> dtype) {
    auto parameter = std::make_unique<Parameter>();
    parameter->name = std::move(name);
    parameter->shape = std::move(shape);
    parameter->dtype = dtype;
    parameter->init = Init::normal(1);
    parameters.push_back(parameter.get());
    owned.push_back(std::move(parameter));
  }
  const Tensor& operator[](std::size_t i) const { return parameters[i]->value; }
};

using DiskTensors = std::vector<std::pair<std::string, Tensor>>;

inline void write_tensors(const std::filesystem::path& path, const DiskTensors& tensors) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos.push_back(tensor_info(name, tensor));
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, tensor] : tensors) writer.write(tensor_bytes(tensor.contiguous()));
  writer.commit();
}

// A multimodal checkpoint of the model: bf16, long prefix, vision and MTP tensors beside it.
inline DiskTensors multimodal_tensors() {
  at::manual_seed(1);
  const auto bf16 = [](at::IntArrayRef shape) { return at::randn(shape).to(kBFloat16); };
  return {{"model.language_model.embed_tokens.weight", bf16({8, 4})},
          {"model.language_model.layers.0.linear_attn.A_log", bf16({3})},
          {"model.language_model.layers.0.mlp.experts.gate_up_proj", bf16({2, 6, 4})},
          {"model.language_model.layers.0.mlp.experts.down_proj", bf16({2, 4, 3})},
          {"model.visual.patch_embed.proj.weight", at::randn({5})},
          {"model.visual.pos_embed.weight", bf16({7})},
          {"mtp.fc.weight", bf16({4, 8})}};
}

// The same values, one tensor an expert.
inline DiskTensors split_experts(const DiskTensors& fused) {
  DiskTensors split;
  for (const auto& [name, tensor] : fused) {
    const auto experts = name.find("experts.");
    if (experts == std::string::npos) {
      split.emplace_back(name, tensor);
      continue;
    }
    const bool down = name.ends_with("down_proj");
    for (std::int64_t e = 0; e < tensor.size(0); ++e) {
      const auto prefix = fmt::format("{}experts.{}.", name.substr(0, experts), e);
      if (down) {
        split.emplace_back(prefix + "down_proj.weight", tensor[e]);
      } else {
        split.emplace_back(prefix + "gate_proj.weight", tensor[e].chunk(2)[0]);
        split.emplace_back(prefix + "up_proj.weight", tensor[e].chunk(2)[1]);
      }
    }
  }
  return split;
}

inline const Tensor& named(const DiskTensors& tensors, std::string_view name) {
  for (const auto& [its_name, tensor] : tensors) {
    if (its_name == name) return tensor;
  }
  throw std::out_of_range(std::string(name));
}

inline void write_model(const std::filesystem::path& folder, const DiskTensors& tensors) {
  write_file(folder / kConfigFile, "{\n  \"model_type\": \"qwen3_5_moe\",  \"eos_token_id\": 7\n}");
  write_tensors(folder / kWeightsFile, tensors);
}

}  // namespace sluice
