// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/export.h"

#include <set>

#include "sluice/checkpoint/test_model.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Name -> dtype, shape and bytes of every tensor in a folder.
std::map<std::string, std::string> tensors_of(const fs::path& folder) {
  std::map<std::string, std::string> all;
  const ModelFolder model(folder);
  for (const auto& tensor : model.tensors()) {
    const auto bytes = tensor.bytes();
    all[tensor.info().name] = fmt::format("{} {} ", dtype_name(tensor.info().dtype), shape_text(tensor.info().shape)) +
                              std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return all;
}

std::set<std::string> files_of(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

class Export : public ::testing::Test {
 protected:
  void load(const DiskTensors& tensors, at::ScalarType dtype = kBFloat16) {
    fs::create_directory(source_path());
    write_model(source_path(), tensors);
    load_parameters(source(), model.parameters, kTestRules, dtype);
  }
  fs::path source_path() const { return folder / "source"; }
  ModelFolder source() const { return ModelFolder(source_path()); }
  fs::path run(const std::string& name, const ExportOptions& options = {}) const {
    export_model(folder / name, model.parameters, source(), kTestRules, options);
    return folder / name;
  }
  TemporaryFolder folder;
  TestModel model;
};

TEST_F(Export, WithoutTrainingEqualsItsSource) {
  for (const auto dtype : {kBFloat16, kFloat}) {  // bf16 values survive fp32
    for (const auto& tensors : {multimodal_tensors(), split_experts(multimodal_tensors())}) {
      fs::remove_all(source_path());
      fs::remove_all(folder / "out");
      load(tensors, dtype);
      EXPECT_EQ(tensors_of(run("out")), tensors_of(source_path()));
      EXPECT_EQ(read_file(folder / "out/config.json"), read_file(source_path() / "config.json"));
    }
  }
}

TEST_F(Export, ThreeInARowAreEqualAndLeaveTheModelAlone) {
  load(multimodal_tensors());
  model[0].add_(1);
  const auto before = model[0].clone();
  for (const auto* name : {"a", "b", "c"}) run(name);
  EXPECT_EQ(read_file(folder / "a/model.safetensors"), read_file(folder / "b/model.safetensors"));
  EXPECT_EQ(read_file(folder / "a/model.safetensors"), read_file(folder / "c/model.safetensors"));
  EXPECT_TRUE(at::equal(model[0], before));
}

TEST_F(Export, WritesTrainedValuesInTheSourcesDtype) {
  load(split_experts(multimodal_tensors()), kFloat);
  for (auto* parameter : model.parameters) parameter->value.mul_(1.5).add_(1e-4);
  run("out");
  TestModel again;
  load_parameters(ModelFolder(folder / "out"), again.parameters, kTestRules, kFloat);
  for (std::size_t i = 0; i < again.parameters.size(); ++i)
    EXPECT_TRUE(at::equal(again[i], model[i].to(kBFloat16).to(kFloat)));
}

TEST_F(Export, CutsShardsAndIndexesThem) {
  load(multimodal_tensors());
  const auto out = run("out", {.max_shard_bytes = 100});
  const auto index = nlohmann::json::parse(read_file(out / kIndexFile));
  EXPECT_FALSE(fs::exists(out / kWeightsFile));
  std::set<std::string> shards;
  std::uint64_t total = 0;
  for (const auto& [name, shard] : index["weight_map"].items()) shards.insert(shard.get<std::string>());
  for (const auto& shard : shards) {
    const SafetensorsFile file(out / shard);
    std::uint64_t bytes = 0;
    for (const auto& tensor : file.tensors()) bytes += tensor.info.bytes();
    EXPECT_TRUE(bytes <= 100 || file.tensors().size() == 1) << shard;
    total += bytes;
  }
  EXPECT_GT(shards.size(), 2u);
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(tensors_of(out), tensors_of(source_path()));
}

TEST_F(Export, AlignsEveryTensor) {
  auto tensors = multimodal_tensors();
  tensors.insert(tensors.begin(), {"mtp.a_byte", at::ones({1}, at::kByte)});
  load(tensors);
  const SafetensorsFile file(run("out") / kWeightsFile);
  for (const auto& tensor : file.tensors())
    EXPECT_EQ(tensor.begin % dtype_bytes(tensor.info.dtype), 0u) << tensor.info.name;
}

TEST_F(Export, DoesNotStoreATiedHeadTwice) {
  auto tensors = multimodal_tensors();
  tensors.emplace_back("lm_head.weight", tensors[0].second);
  load(tensors);
  auto expected = tensors_of(source_path());
  expected.erase("lm_head.weight");
  EXPECT_EQ(tensors_of(run("out")), expected);
}

TEST_F(Export, CopiesTheTokenizerAndMakesAGenerationConfig) {
  load(multimodal_tensors());
  write_file(source_path() / "tokenizer.json",
             R"({"added_tokens": [{"id": 9, "content": "<|im_end|>"}, {"id": 8, "content": "x"}]})");
  write_file(source_path() / "tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  write_file(source_path() / "optimizer.pt", "no part of a model");
  const auto out = run("out");
  EXPECT_EQ(files_of(out), (std::set<std::string>{"config.json", "generation_config.json", "model.safetensors",
                                                  "tokenizer.json", "tokenizer_config.json"}));
  EXPECT_EQ(nlohmann::json::parse(read_file(out / kGenerationConfigFile))["eos_token_id"], nlohmann::json({7, 9}));
}

TEST_F(Export, KeepsAGenerationConfigThatIsThere) {
  load(multimodal_tensors());
  write_file(source_path() / "generation_config.json", "{ \"top_k\": 20 }");
  EXPECT_EQ(read_file(run("out") / kGenerationConfigFile), "{ \"top_k\": 20 }");
}

TEST_F(Export, RefusesAFolderThatHoldsSomething) {
  load(multimodal_tensors());
  run("out");
  try {
    run("out");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("is not empty"));
  }
}

TEST_F(Export, AFailureLeavesNothing) {
  load(multimodal_tensors());
  model.parameters[3]->value = at::zeros({1});
  EXPECT_THROW(run("out"), Error);
  EXPECT_EQ(files_of(folder.path()), std::set<std::string>{"source"});
}

TEST_F(Export, AFreshModelIsWrittenAsItsFamilyPublishesIt) {
  initialize(model.parameters, kBFloat16, 3);
  export_fresh_model(folder / "new", model.parameters,
                     {{"model_type", "qwen3_5_moe"}, {"eos_token_id", 5}, {"torch_dtype", "float32"}}, kTestRules,
                     kBFloat16);
  const auto config = nlohmann::json::parse(read_file(folder / "new/config.json"));
  EXPECT_EQ(config["dtype"], "bfloat16");
  EXPECT_FALSE(config.contains("torch_dtype"));
  EXPECT_EQ(tensors_of(folder / "new").count("model.layers.0.mlp.experts.1.up_proj.weight"), 1u);
  TestModel again;
  load_parameters(ModelFolder(folder / "new"), again.parameters, kTestRules, kBFloat16);
  for (std::size_t i = 0; i < again.parameters.size(); ++i) EXPECT_TRUE(at::equal(again[i], model[i]));
}

TEST_F(Export, AFreshModelCarriesNoLayoutMarker) {
  initialize(model.parameters, kBFloat16, 3);
  EXPECT_THAT(
      data_error([&] {
        export_fresh_model(folder / "new", model.parameters, {{"weight_layout_version", 2}}, kTestRules, kBFloat16);
      }),
      HasSubstr("weight_layout_version"));
  EXPECT_FALSE(fs::exists(folder / "new"));
}

}  // namespace
}  // namespace sluice
