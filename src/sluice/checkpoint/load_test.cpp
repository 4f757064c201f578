// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/load.h"

#include "sluice/checkpoint/test_model.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

LoadReport load(const TemporaryFolder& folder, const TestModel& model, at::ScalarType dtype = kBFloat16) {
  return load_parameters(ModelFolder(folder.path()), model.parameters, kTestRules, dtype);
}

TEST(Load, FillsEveryParameterAndSaysWhatItSetAside) {
  const TemporaryFolder folder;
  const auto tensors = multimodal_tensors();
  write_model(folder.path(), tensors);
  const TestModel model;
  const auto report = load(folder, model);
  EXPECT_TRUE(at::equal(model[0], tensors[0].second));
  EXPECT_TRUE(at::equal(model[2], tensors[2].second));
  EXPECT_TRUE(at::equal(model[3], tensors[3].second));
  EXPECT_EQ(report.aside_line(), "set aside: 1 tensor (MTP block), 2 tensors (vision tower)");
  ASSERT_EQ(report.rows.size(), 7u);
  EXPECT_EQ(report.rows[0].disk.name, "model.language_model.embed_tokens.weight");
  EXPECT_EQ(report.rows[0].parameter, "model.embed_tokens.weight");
  EXPECT_EQ(report.rows[4].aside_reason, "vision tower");
}

TEST(Load, HoldsEachParameterInItsDtype) {
  const TemporaryFolder folder;
  write_model(folder.path(), multimodal_tensors());
  const TestModel model;
  load(folder, model, kFloat);
  for (const auto* parameter : model.parameters) EXPECT_EQ(parameter->value.scalar_type(), kFloat);
  load(folder, model, kBFloat16);
  EXPECT_EQ(model[0].scalar_type(), kBFloat16);
  EXPECT_EQ(model[1].scalar_type(), kFloat) << "A_log stays in fp32";
}

TEST(Load, FusedAndSplitExpertsGiveTheSameModel) {
  const TemporaryFolder fused, split;
  write_model(fused.path(), multimodal_tensors());
  write_model(split.path(), split_experts(multimodal_tensors()));
  const TestModel a, b;
  load(fused, a);
  load(split, b);
  for (std::size_t i = 0; i < a.parameters.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << a.parameters[i]->name;
}

TEST(Load, DoesNotCopyWhatHasItsDtypeAndTrainsItInPlace) {
  const TemporaryFolder folder;
  write_model(folder.path(), multimodal_tensors());
  const auto before = read_file(folder / kWeightsFile);
  const TestModel model;
  const auto report = load(folder, model);
  EXPECT_EQ(report.shared, 3);  // all but A_log, which is converted
  model[0].add_(1);             // the folder object is gone; the tensor keeps the mapping
  EXPECT_TRUE(at::equal(model[0], (multimodal_tensors()[0].second + 1)));
  EXPECT_EQ(read_file(folder / kWeightsFile), before);
}

TEST(Load, ReadsTensorsThatTheFileDoesNotAlign) {
  const TemporaryFolder folder;
  auto tensors = multimodal_tensors();
  tensors.insert(tensors.begin(), {"mtp.byte", at::ones({1}, at::kByte)});
  write_model(folder.path(), tensors);
  const TestModel model;
  EXPECT_EQ(load(folder, model).shared, 0);
  EXPECT_TRUE(at::equal(model[0], tensors[1].second));
  EXPECT_TRUE(at::equal(model[2], tensors[3].second));
}

// 12 pieces, which lie in the file as their names sort: shard_10 before shard_2.
DiskTensors sharded_table() {
  DiskTensors tensors;
  for (int i = 0; i < 12; ++i) tensors.emplace_back(fmt::format("ngram.shard_{}.weight", i), at::full({2, 3}, 1.0 * i));
  std::ranges::sort(tensors, {}, [](const auto& tensor) { return tensor.first; });
  return tensors;
}

TEST(Load, ATableHeldAsStoredLiesOverTheFileInItsPieces) {
  const TemporaryFolder folder;
  write_model(folder.path(), sharded_table());
  Parameter table{.name = "ngram.weight", .shape = {24, 3}, .frozen = true, .as_stored = true, .init = Init::normal(1)};
  const WeightRules rules{.prefixes = {}, .aside = {}, .pieces = {{"ngram.weight", {"ngram.shard_{}.weight"}, false}}};
  const ModelFolder disk(folder.path());
  load_parameters(disk, {&table}, rules, kBFloat16);
  EXPECT_FALSE(table.value.defined());
  ASSERT_EQ(table.pieces.size(), 12u);
  for (int i = 0; i < 12; ++i)
    EXPECT_TRUE(table.pieces[i].equal(at::full({2, 3}, 1.0 * i))) << i;  // float32, as stored
  EXPECT_EQ(table.pieces[2].const_data_ptr(), disk.tensors()[4].bytes().data());

  write_tensors(folder / kWeightsFile, {{"ngram.weight", at::ones({24, 3})}});
  load_parameters(ModelFolder(folder.path()), {&table}, rules, kBFloat16);
  EXPECT_TRUE(table.pieces.empty());
  EXPECT_TRUE(table.value.equal(at::ones({24, 3})));
}

TEST(Load, RefusesConstantsThatDoNotFollowFromTheConfiguration) {
  const TemporaryFolder folder;
  write_model(folder.path(), {{"hash.multipliers", at::tensor({5, 7}, at::TensorOptions().dtype(kLong))}});
  Parameter constants{
      .name = "hash.multipliers", .shape = {2}, .dtype = kLong, .frozen = true, .init = Init::exactly({5, 7})};
  const auto load = [&] { load_parameters(ModelFolder(folder.path()), {&constants}, {}, kBFloat16); };
  load();
  EXPECT_EQ(constants.value.scalar_type(), kLong);
  constants.init = Init::exactly({5, 8});
  EXPECT_THAT(data_error(load), HasSubstr("hash.multipliers[1]: expected 8, which follows from config.json, found 7"));
}

TEST(Load, OneErrorNamesWhatIsMissingAndWhatIsUnexpected) {
  const TemporaryFolder folder;
  auto tensors = multimodal_tensors();
  tensors[1].first += "s";
  write_model(folder.path(), tensors);
  const TestModel model;
  EXPECT_THAT(data_error([&] { load(folder, model); }),
              AllOf(HasSubstr("1 tensor missing (first: model.language_model.layers.0.linear_attn.A_log)"),
                    HasSubstr("1 tensor unexpected (first: model.language_model.layers.0.linear_attn.A_logs)")));
  EXPECT_FALSE(model[0].defined()) << "nothing is loaded when something does not fit";
}

TEST(Load, ReportsTensorsOutsideTheIndex) {
  const TemporaryFolder folder;
  const auto tensors = multimodal_tensors();
  write_model(folder.path(), tensors);
  nlohmann::json index;
  for (const auto& [name, tensor] : tensors) {
    if (name != "mtp.fc.weight") index["weight_map"][name] = kWeightsFile;
  }
  write_file(folder / kIndexFile, index.dump());
  const TestModel model;
  EXPECT_THAT(load(folder, model).unlisted, ElementsAre("mtp.fc.weight in model.safetensors"));
}

TEST(TensorIo, EveryDtypeHasItsScalarType) {
  for (int i = 0; i <= static_cast<int>(Dtype::kU64); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(stored_dtype(scalar_type(dtype)), dtype);
    EXPECT_EQ(c10::elementSize(scalar_type(dtype)), dtype_bytes(dtype)) << dtype_name(dtype);
  }
  EXPECT_THROW(stored_dtype(at::kComplexFloat), Error);
}

}  // namespace
}  // namespace sluice
