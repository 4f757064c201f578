// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/model_folder.h"

#include "sluice/formats/test_files.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const TensorInfo kA{"a", Dtype::kF32, {2}}, kB{"b", Dtype::kF32, {2}}, kC{"c", Dtype::kF32, {2}};

// Three shards of one tensor each.
class Sharded : public ::testing::Test {
 protected:
  Sharded() {
    write_file(folder / "config.json", R"({"model_type": "qwen3_5"})");
    write_safetensors(shard(1), {kA});
    write_safetensors(shard(2), {kB});
    write_safetensors(shard(3), {kC});
    write_index({{"a", 1}, {"b", 2}, {"c", 3}});
  }
  std::filesystem::path shard(int number) const { return folder / shard_name(number); }
  static std::string shard_name(int number) { return fmt::format("model-{:05}-of-00003.safetensors", number); }
  void write_index(const std::map<std::string, int>& shards) const {
    nlohmann::json index = {{"metadata", {{"total_size", 24}}}};
    for (const auto& [name, number] : shards) index["weight_map"][name] = shard_name(number);
    write_file(folder / kIndexFile, index.dump());
  }
  std::string error() const {
    return data_error([&] { ModelFolder{folder.path()}; });
  }
  TemporaryFolder folder;
};

TEST_F(Sharded, OpensWithEveryTensorOfTheIndex) {
  const ModelFolder model(folder.path());
  ASSERT_EQ(model.tensors().size(), 3u);
  EXPECT_EQ(model.tensors()[2].info().name, "c");
  EXPECT_EQ(model.tensors()[2].bytes().size(), 8u);
  EXPECT_TRUE(model.unlisted().empty());
}

TEST_F(Sharded, NamesAMissingShard) {
  std::filesystem::remove(shard(2));
  EXPECT_THAT(error(), AllOf(HasSubstr("model-00002-of-00003.safetensors is missing"), HasSubstr("first: b")));
}

TEST_F(Sharded, NamesAShortShard) {
  std::filesystem::resize_file(shard(3), std::filesystem::file_size(shard(3)) - 5);
  EXPECT_THAT(error(), AllOf(HasSubstr("model-00003-of-00003.safetensors ends early"), HasSubstr("Download it again")));
}

TEST_F(Sharded, NamesATensorThatItsShardLacks) {
  write_index({{"a", 1}, {"b", 2}, {"c", 1}});
  EXPECT_THAT(error(), AllOf(HasSubstr("\"c\" is not in model-00001-of-00003.safetensors")));
}

TEST_F(Sharded, DoesNotReadAFileThatTheIndexDoesNotName) {
  write_file(folder / "stray.safetensors", "not even a safetensors file");
  write_safetensors(folder / kWeightsFile, {kA});
  EXPECT_EQ(ModelFolder(folder.path()).tensors().size(), 3u);
}

TEST_F(Sharded, ReportsATensorThatTheIndexDoesNotName) {
  write_safetensors(shard(2), {kB, {"extra", Dtype::kF32, {1}}});
  const ModelFolder model(folder.path());
  EXPECT_EQ(model.tensors().size(), 3u);
  EXPECT_THAT(model.unlisted(), ElementsAre("extra in model-00002-of-00003.safetensors"));
}

TEST_F(Sharded, ReportsATensorThatLiesInTwoShards) {
  write_safetensors(shard(2), {kA, kB}, 7);
  const ModelFolder model(folder.path());
  EXPECT_THAT(model.unlisted(), ElementsAre("a in model-00002-of-00003.safetensors"));
  EXPECT_EQ(model.tensors()[0].bytes()[0], std::byte{1}) << "read from the shard that the index names";
}

TEST(Index, StaysInItsFolder) {
  for (const auto* shard : {"../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ""}) {
    const auto text = nlohmann::json{{"weight_map", {{"w", shard}}}}.dump();
    EXPECT_THAT(data_error([&] { parse_index(text, "i.json"); }), HasSubstr("a file of the same folder")) << shard;
  }
  EXPECT_THAT(data_error([] { parse_index(R"({"weight_map": {"w": 3}})", "i.json"); }),
              HasSubstr("a file of the same folder"));
  EXPECT_THAT(data_error([] { parse_index(R"({"weight_map": []})", "i.json"); }), HasSubstr("weight_map"));
  EXPECT_THAT(data_error([] { parse_index("[]", "i.json"); }), HasSubstr("weight_map"));
}

TEST(ModelFolder, OpensASingleFile) {
  const TemporaryFolder folder;
  write_file(folder / "config.json", "{}");
  write_safetensors(folder / kWeightsFile, {kB, kA});
  const ModelFolder model(folder.path());
  ASSERT_EQ(model.tensors().size(), 2u);
  EXPECT_EQ(model.tensors()[0].info().name, "a");
}

TEST(ModelFolder, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  const auto error = [&] { return data_error([&] { ModelFolder{folder.path()}; }); };
  EXPECT_THAT(data_error([&] { ModelFolder{folder / "nowhere"}; }), HasSubstr("not a folder"));
  EXPECT_THAT(error(), HasSubstr("no config.json"));
  write_file(folder / "config.json", "[]");
  EXPECT_THAT(error(), HasSubstr("expected a JSON object"));
  write_file(folder / "config.json", "{}");
  EXPECT_THAT(error(), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  write_file(folder / "model-00001-of-00002.safetensors", "");
  EXPECT_THAT(error(), HasSubstr("has no index"));
  write_file(folder / "pytorch_model.bin", "");
  EXPECT_THAT(error(), HasSubstr("safe_serialization"));
}

// RUN in the place of RUN/export is the mistake that people make; a run may have exported an adapter, or nothing yet.
TEST(ModelFolder, OfATrainingRunIsInsideIt) {
  const TemporaryFolder run;
  const auto error = [](const std::filesystem::path& path) { return data_error([&] { ModelFolder{path}; }); };
  std::filesystem::create_directories(run / "checkpoints/step_1");
  write_file(run / "checkpoints/step_1/meta.json", "{}");
  for (const auto& path : {run.path(), run / "checkpoints/step_1"}) {
    EXPECT_THAT(error(path), HasSubstr("`sluice export " + path.string() + " --out DIR` makes a model folder"));
  }
  const auto exported = run / "export";
  std::filesystem::create_directories(exported);
  EXPECT_THAT(error(run.path()), HasSubstr("`sluice export "));
  write_file(exported / "adapter_model.safetensors", "");
  EXPECT_THAT(error(run.path()), AllOf(HasSubstr("whose export is " + exported.string() + ". It holds a LoRA adapter"),
                                       HasSubstr("--adapter " + exported.string())));
  write_file(exported / "config.json", "{}");
  EXPECT_THAT(error(run.path()), HasSubstr("give the model that the run exported: " + exported.string()));
}

TEST(ModelFolder, RefusesForeignLayoutsByName) {
  const TemporaryFolder folder;
  write_safetensors(folder / kWeightsFile, {kA});
  for (const auto* config : {R"({"weight_layout_version": 2})", R"({"text_config": {"weight_layout_version": 2}})"}) {
    write_file(folder / "config.json", config);
    EXPECT_THAT(data_error([&] { ModelFolder{folder.path()}; }),
                AllOf(HasSubstr("config.json"), HasSubstr("weight_layout_version")));
  }
  write_file(folder / "config.json", "{}");
  write_file(folder / kWeightsFile, raw_safetensors(R"({"__metadata__":{"weight_layout_version":"2"}})", 0));
  EXPECT_THAT(data_error([&] { ModelFolder{folder.path()}; }),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("weight_layout_version")));
  write_safetensors(folder / kWeightsFile, {{"weight_layout_version", Dtype::kI64, {}}});
  EXPECT_THAT(data_error([&] { ModelFolder{folder.path()}; }), HasSubstr("tensor weight_layout_version"));
  // MLX has the convolution's last two dimensions the other way round.
  write_file(folder / kWeightsFile, raw_safetensors(R"({"__metadata__":{"format":"mlx"}})", 0));
  EXPECT_THAT(data_error([&] { ModelFolder{folder.path()}; }),
              AllOf(HasSubstr("model.safetensors"), HasSubstr(R"(format "mlx")"), HasSubstr("converted from")));
  write_file(folder / kWeightsFile, raw_safetensors(R"({"__metadata__":{"format":"pt"}})", 0));
  ModelFolder{folder.path()};
}

TEST(ModelFolder, SaysWhatToDoWithATrainersCheckpoint) {
  for (const auto* file : {"__0_0.distcp", "latest_checkpointed_iteration.txt"}) {
    const TemporaryFolder folder;
    const auto error = [&] { return data_error([&] { ModelFolder{folder.path()}; }); };
    write_file(folder / file, "");
    EXPECT_THAT(error(), AllOf(HasSubstr("no config.json"), HasSubstr("Megatron or PyTorch")));
    write_file(folder / "config.json", "{}");
    EXPECT_THAT(error(), AllOf(HasSubstr("neither model.safetensors"), HasSubstr("Megatron or PyTorch")));
  }
}

TEST(ModelFolder, ReadsTheNestedTextConfig) {
  const nlohmann::json nested = {{"text_config", {{"hidden_size", 8}}}}, flat = {{"hidden_size", 4}};
  EXPECT_EQ(text_config(nested)["hidden_size"], 8);
  EXPECT_EQ(text_config(flat)["hidden_size"], 4);
}

TEST(ModelFolder, KnowsItsCompanions) {
  const TemporaryFolder folder;
  for (const auto* name :
       {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
        "chat_template.jinja", "preprocessor_config.json", "video_preprocessor_config.json", "special_tokens_map.json",
        "added_tokens.json", "generation_config.json", "optimizer.pt", "README.md", "LICENSE"}) {
    write_file(folder / name, "");
  }
  EXPECT_THAT(companion_files(folder.path()),
              ElementsAre("LICENSE", "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt",
                          "preprocessor_config.json", "special_tokens_map.json", "tokenizer.json",
                          "tokenizer_config.json", "video_preprocessor_config.json", "vocab.json"));
}

// A folder of one FP8 weight [300, 130] and `scale`.
void write_fp8(const TemporaryFolder& folder, const TensorInfo& scale, const std::string& block = "[128, 64]") {
  write_file(folder / "config.json", R"({"quantization_config": {"weight_block_size": )" + block + "}}");
  write_safetensors(folder / kWeightsFile, {{"x.weight", Dtype::kF8E4M3, {300, 130}}, scale});
}
std::string fp8_error(const TensorInfo& scale, const std::string& block = "[128, 64]") {
  const TemporaryFolder folder;
  write_fp8(folder, scale, block);
  return data_error([&] { ModelFolder{folder.path()}; });
}

TEST(ModelFolder, TheScalesOfAnFp8TensorGoWithIt) {
  for (const auto& scale :
       {TensorInfo{"x.weight_scale_inv", Dtype::kBF16, {3, 3}}, TensorInfo{"x.weight_scale", Dtype::kF32, {1}}}) {
    const TemporaryFolder folder;
    write_fp8(folder, scale);
    const ModelFolder model(folder.path());
    ASSERT_EQ(model.tensors().size(), 1u);
    ASSERT_NE(model.tensors()[0].scale, nullptr);
    EXPECT_EQ(model.tensors()[0].scale->info.name, scale.name);
    EXPECT_EQ(model.fp8_block().columns, 64);
  }
}

TEST(ModelFolder, ScalesThatDoNotFitAreRefused) {
  EXPECT_THAT(fp8_error({"x.weight_scale_inv", Dtype::kBF16, {3, 2}}),
              HasSubstr("x.weight_scale_inv: expected [3, 3] of a float dtype, one scale for each block of 128 x 64 of "
                        "[300, 130], found [3, 2] BF16"));
  EXPECT_THAT(fp8_error({"x.weight_scale_inv", Dtype::kU8, {3, 3}}), HasSubstr("found [3, 3] U8"));
  EXPECT_THAT(fp8_error({"x.weight_scale", Dtype::kF32, {300}}), HasSubstr("expected [1]"));
  EXPECT_THAT(fp8_error({"x.weight_scale_inv", Dtype::kBF16, {3, 3}}, "[128]"), HasSubstr("weight_block_size"));
  EXPECT_THAT(fp8_error({"x.weight_scale_inv", Dtype::kBF16, {3, 3}}, "[0, 128]"), HasSubstr("weight_block_size"));
}

}  // namespace
}  // namespace sluice
