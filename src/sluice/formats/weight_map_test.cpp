// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/weight_map.h"

#include <algorithm>

#include "sluice/formats/test_files.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TensorInfo bf16(std::string name, std::vector<std::int64_t> shape) {
  return {std::move(name), Dtype::kBF16, std::move(shape)};
}

// The rules of a multimodal mixture-of-experts family.
const WeightRules kRules{
    .prefixes = {{"model.language_model.", "model."}},
    .aside = {{"model.visual.*", "vision tower"},
              {"mtp.*", "MTP block"},
              {"lm_head.weight", "tied to the embedding", false}},
    .pieces = {{"experts.gate_up_proj", {"experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"}, true, true},
               {"experts.down_proj", {"experts.{}.down_proj.weight"}, true, true},
               {"ngram.weight", {"ngram.shard_{}.weight"}, false}}};

const std::vector<WantedTensor> kWanted = {{"model.embed.weight", {10, 4}}, {"model.layers.0.A_log", {2}}};
const std::vector<WantedTensor> kExperts = {{"model.mlp.experts.gate_up_proj", {2, 6, 4}},
                                            {"model.mlp.experts.down_proj", {2, 4, 3}}};

std::vector<MappedTensor> map(const std::vector<TensorInfo>& disk, const std::vector<WantedTensor>& wanted = kWanted) {
  return map_weights("folder", disk, wanted, kRules);
}
std::string error(const std::vector<TensorInfo>& disk, const std::vector<WantedTensor>& wanted = kWanted) {
  return data_error([&] { map(disk, wanted); });
}

TEST(WeightMap, AcceptsLongAndShortPrefixes) {
  const auto longer =
      map({bf16("model.language_model.embed.weight", {10, 4}), bf16("model.language_model.layers.0.A_log", {2})});
  const auto shorter = map({bf16("model.embed.weight", {10, 4}), bf16("model.layers.0.A_log", {2})});
  for (const auto* mapped : {&longer, &shorter}) {
    EXPECT_EQ((*mapped)[0].parameter, 0u);
    EXPECT_EQ((*mapped)[1].parameter, 1u);
  }
}

TEST(WeightMap, SetsAsideWithTheReason) {
  const auto mapped = map({bf16("model.embed.weight", {10, 4}), bf16("model.layers.0.A_log", {2}),
                           bf16("model.visual.x", {1}), bf16("mtp.fc.weight", {1}), bf16("lm_head.weight", {10, 4})});
  EXPECT_FALSE(mapped[2].parameter);
  EXPECT_EQ(mapped[2].aside_reason, "vision tower");
  EXPECT_EQ(mapped[3].aside_reason, "MTP block");
  EXPECT_TRUE(mapped[3].exported);
  EXPECT_FALSE(mapped[4].exported);
}

TEST(WeightMap, AParameterGoesBeforeAPattern) {
  const auto mapped = map({bf16("mtp.fc.weight", {1})}, {{"mtp.fc.weight", {1}}});
  EXPECT_EQ(mapped[0].parameter, 0u);
}

TEST(WeightMap, NamesAMissingTensorAsTheFolderWouldSpellIt) {
  EXPECT_THAT(error({bf16("model.language_model.embed.weight", {10, 4})}),
              AllOf(HasSubstr("folder"), HasSubstr("1 tensor missing (first: model.language_model.layers.0.A_log)"),
                    Not(HasSubstr("unexpected"))));
}

TEST(WeightMap, NamesBothSidesOfARenamedTensor) {
  EXPECT_THAT(error({bf16("model.embed.weight", {10, 4}), bf16("model.layers.0.A_logs", {2})}),
              AllOf(HasSubstr("1 tensor missing (first: model.layers.0.A_log)"),
                    HasSubstr("1 tensor unexpected (first: model.layers.0.A_logs)"),
                    HasSubstr("model.layers.0.A_logs looks like model.layers.0.A_log under another name")));
}

TEST(WeightMap, TellsEveryKindOfFaultAtOnce) {
  const std::vector<WantedTensor> wanted = {{"a", {2}}, {"b", {2}}, {"c", {2}}, {"model.d", {2}}, {"e", {2}}};
  const auto message = error({bf16("b", {3}),
                              {"c", Dtype::kF8E4M3, {2}},
                              bf16("model.d", {2}),
                              bf16("model.language_model.d", {2}),
                              bf16("zzzzzzzz", {1})},
                             wanted);
  EXPECT_THAT(message, HasSubstr("2 tensors missing (first: a)"));
  EXPECT_THAT(message, HasSubstr("1 tensor unexpected (first: zzzzzzzz)"));
  EXPECT_THAT(message, HasSubstr("1 tensor of another shape (first: b: expected [2], found [3])"));
  EXPECT_THAT(message, HasSubstr("1 tensor of a dtype without its scale (first: c: F8_E4M3)"));
  EXPECT_THAT(message, HasSubstr("1 tensor stored twice (first: model.d and model.language_model.d)"));
}

TEST(WeightMap, IntegerParametersTakeIntegers) {
  EXPECT_EQ(map({{"table", Dtype::kI64, {2}}}, {{"table", {2}, false}})[0].parameter, 0u);
}

std::vector<TensorInfo> split_experts() {
  std::vector<TensorInfo> disk;
  for (const auto* expert : {"0", "1"}) {
    const auto prefix = fmt::format("model.language_model.mlp.experts.{}.", expert);
    disk.push_back(bf16(prefix + "gate_proj.weight", {3, 4}));
    disk.push_back(bf16(prefix + "up_proj.weight", {3, 4}));
    disk.push_back(bf16(prefix + "down_proj.weight", {4, 3}));
  }
  return disk;
}

TEST(WeightMap, ExpertsMayBeFused) {
  const auto mapped = map(
      {bf16("model.mlp.experts.gate_up_proj", {2, 6, 4}), bf16("model.mlp.experts.down_proj", {2, 4, 3})}, kExperts);
  EXPECT_EQ(mapped[0].parameter, 0u);
  EXPECT_EQ(mapped[1].parameter, 1u);
}

TEST(WeightMap, ExpertsMayBeSplit) {
  const auto mapped = map(split_experts(), kExperts);
  const std::vector<std::int64_t> offsets = {0, 12, 0, 24, 36, 12};  // gate above up, expert by expert
  for (std::size_t i = 0; i < mapped.size(); ++i) {
    EXPECT_EQ(mapped[i].parameter, i % 3 == 2 ? 1u : 0u);
    EXPECT_EQ(mapped[i].offset, offsets[i]) << mapped[i].disk.name;
  }
}

TEST(WeightMap, NamesTheMissingPiece) {
  auto disk = split_experts();
  disk.erase(disk.begin() + 4);
  EXPECT_THAT(error(disk, kExperts),
              HasSubstr("1 tensor missing (first: model.language_model.mlp.experts.1.up_proj.weight)"));
}

TEST(WeightMap, RefusesAnExpertTooManyAndBothForms) {
  auto disk = split_experts();
  disk.push_back(bf16("model.language_model.mlp.experts.2.down_proj.weight", {4, 3}));
  EXPECT_THAT(error(disk, kExperts),
              HasSubstr("1 tensor unexpected (first: model.language_model.mlp.experts.2.down_proj.weight)"));
  disk.back() = bf16("model.language_model.mlp.experts.down_proj", {2, 4, 3});
  EXPECT_THAT(error(disk, kExperts), HasSubstr("stored twice"));
  disk.back() = bf16("model.language_model.mlp.experts.01.down_proj.weight", {4, 3});
  EXPECT_THAT(error(disk, kExperts), HasSubstr("unexpected"));
  disk.back() = bf16("model.language_model.mlp.experts.99999999999999999999.down_proj.weight", {4, 3});
  EXPECT_THAT(error(disk, kExperts), HasSubstr("unexpected"));
}

TEST(WeightMap, JoinsRowsInNumericOrder) {
  std::vector<TensorInfo> disk;
  for (int i = 0; i < 12; ++i) disk.push_back(bf16(fmt::format("ngram.shard_{}.weight", i), {2, 3}));
  std::ranges::sort(disk, {}, &TensorInfo::name);  // shard_10 before shard_2
  for (const auto& tensor : map(disk, {{"ngram.weight", {24, 3}}})) {
    EXPECT_EQ(fmt::format("ngram.shard_{}.weight", tensor.offset / 6), tensor.disk.name);
  }
  std::erase_if(disk, [](const TensorInfo& tensor) { return tensor.name == "ngram.shard_7.weight"; });
  EXPECT_THAT(error(disk, {{"ngram.weight", {24, 3}}}), HasSubstr("missing (first: ngram.shard_7.weight)"));
}

TEST(WeightMap, AFreshModelIsWrittenAsItsRulesSayAndReadsBack) {
  std::vector<TensorInfo> disk;
  for (std::size_t i = 0; i < kExperts.size(); ++i) {
    for (const auto& tensor : fresh_tensors(kExperts[i], i, Dtype::kBF16, kRules)) disk.push_back(tensor.disk);
  }
  EXPECT_EQ(disk.size(), 6u);
  EXPECT_EQ(map(disk, kExperts).size(), 6u);
  EXPECT_EQ(fresh_tensors(kWanted[0], 0, Dtype::kF32, kRules)[0].disk.name, "model.embed.weight");
}

}  // namespace
}  // namespace sluice
