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
               {"ngram.weight", {"ngram.shard_{}.weight"}, false, true, 12}}};

const std::vector<WantedTensor> kWanted = {{"model.embed.weight", {10, 4}}, {"model.layers.0.A_log", {2}}};
const std::vector<WantedTensor> kExperts = {{"model.mlp.experts.gate_up_proj", {2, 6, 4}},
                                            {"model.mlp.experts.down_proj", {2, 4, 3}}};

std::vector<MappedTensor> map(const std::vector<TensorInfo>& disk, const std::vector<WantedTensor>& wanted = kWanted) {
  return map_weights("folder", disk, wanted, kRules);
}
std::string error(const std::vector<TensorInfo>& disk, const std::vector<WantedTensor>& wanted = kWanted) {
  return data_error([&] { map(disk, wanted); });
}

// The one parameter that a tensor fills, and no other.
std::size_t parameter_of(const MappedTensor& mapped) {
  EXPECT_EQ(mapped.runs.size(), 1u) << mapped.disk.name;
  return mapped.runs.at(0).parameter;
}

TEST(WeightMap, AcceptsLongAndShortPrefixes) {
  const auto longer =
      map({bf16("model.language_model.embed.weight", {10, 4}), bf16("model.language_model.layers.0.A_log", {2})});
  const auto shorter = map({bf16("model.embed.weight", {10, 4}), bf16("model.layers.0.A_log", {2})});
  for (const auto* mapped : {&longer, &shorter}) {
    EXPECT_EQ(parameter_of((*mapped)[0]), 0u);
    EXPECT_EQ(parameter_of((*mapped)[1]), 1u);
  }
}

TEST(WeightMap, SetsAsideWithTheReason) {
  const auto mapped = map({bf16("model.embed.weight", {10, 4}), bf16("model.layers.0.A_log", {2}),
                           bf16("model.visual.x", {1}), bf16("mtp.fc.weight", {1}), bf16("lm_head.weight", {10, 4})});
  EXPECT_TRUE(mapped[2].runs.empty());
  EXPECT_EQ(mapped[2].aside_reason, "vision tower");
  EXPECT_EQ(mapped[3].aside_reason, "MTP block");
  EXPECT_TRUE(mapped[3].exported);
  EXPECT_FALSE(mapped[4].exported);
}

TEST(WeightMap, AParameterGoesBeforeAPattern) {
  const auto mapped = map({bf16("mtp.fc.weight", {1})}, {{"mtp.fc.weight", {1}}});
  EXPECT_EQ(parameter_of(mapped[0]), 0u);
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
  EXPECT_EQ(parameter_of(map({{"table", Dtype::kI64, {2}}}, {{"table", {2}, false}})[0]), 0u);
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
  EXPECT_EQ(parameter_of(mapped[0]), 0u);
  EXPECT_EQ(parameter_of(mapped[1]), 1u);
}

TEST(WeightMap, ExpertsMayBeSplit) {
  const auto mapped = map(split_experts(), kExperts);
  const std::vector<std::int64_t> offsets = {0, 12, 0, 24, 36, 12};  // gate above up, expert by expert
  for (std::size_t i = 0; i < mapped.size(); ++i) {
    EXPECT_EQ(parameter_of(mapped[i]), i % 3 == 2 ? 1u : 0u);
    EXPECT_EQ(mapped[i].runs[0].offset, offsets[i]) << mapped[i].disk.name;
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
    EXPECT_EQ(fmt::format("ngram.shard_{}.weight", tensor.runs.at(0).offset / 6), tensor.disk.name);
  }
  std::erase_if(disk, [](const TensorInfo& tensor) { return tensor.name == "ngram.shard_7.weight"; });
  EXPECT_THAT(error(disk, {{"ngram.weight", {24, 3}}}), HasSubstr("missing (first: ngram.shard_7.weight)"));
}

// Two key heads of q (1 row), k (1 row) and v (2 rows), then z (2 rows): kJoined rows 0 to 11 are q0 k0 v0 z0 q1 k1 v1
// z1.
const WeightRules kInterleaved{.prefixes = {{"model.language_model.", "model."}},
                               .aside = {},
                               .pieces = {},
                               .interleaved = {{.tensor = "attn.qkvz.weight",
                                                .groups = 2,
                                                .parts = {{"attn.qkv.weight", 0, 1},
                                                          {"attn.qkv.weight", 2, 1},
                                                          {"attn.qkv.weight", 4, 2},
                                                          {"attn.z.weight", 0, 2}}}}};
const std::vector<WantedTensor> kJoined = {{"model.0.attn.qkv.weight", {8, 5}}, {"model.0.attn.z.weight", {4, 5}}};

TEST(WeightMap, InterleavedRowsGoToTheirParameters) {
  const auto mapped = map_weights("folder", std::vector{bf16("model.language_model.0.attn.qkvz.weight", {12, 5})},
                                  kJoined, kInterleaved);
  ASSERT_EQ(mapped.size(), 1u);
  std::vector<std::pair<std::size_t, std::int64_t>> rows;  // parameter and row of each row on disk
  for (const auto& run : mapped[0].runs) {
    for (std::int64_t i = 0; i < run.elements; i += 5) rows.emplace_back(run.parameter, (run.offset + i) / 5);
  }
  const std::vector<std::pair<std::size_t, std::int64_t>> expected = {{0, 0}, {0, 2}, {0, 4}, {0, 5}, {1, 0}, {1, 1},
                                                                      {0, 1}, {0, 3}, {0, 6}, {0, 7}, {1, 2}, {1, 3}};
  EXPECT_EQ(rows, expected);
}

TEST(WeightMap, AnInterleavedTensorIsNamedWhereItIsMissingMisshapenOrSplit) {
  const auto error_of_map = [](const std::vector<TensorInfo>& disk) {
    return data_error([&] { map_weights("folder", disk, kJoined, kInterleaved); });
  };
  EXPECT_THAT(error_of_map({}), HasSubstr("1 tensor missing (first: model.0.attn.qkvz.weight)"));
  EXPECT_THAT(error_of_map({bf16("model.0.attn.qkvz.weight", {8, 5})}),
              HasSubstr("model.0.attn.qkvz.weight: expected [12, 5], found [8, 5]"));
  // The flat parameters of another family's folder are not this one's, whatever their rows hold.
  EXPECT_THAT(
      error_of_map({bf16("model.0.attn.qkv.weight", {8, 5}), bf16("model.0.attn.z.weight", {4, 5})}),
      AllOf(HasSubstr("1 tensor missing (first: model.0.attn.qkvz.weight)"), HasSubstr("2 tensors unexpected")));
}

TEST(WeightMap, AFreshModelIsWrittenAsItsRulesSayAndReadsBack) {
  const auto fresh = [](const std::vector<WantedTensor>& wanted, const WeightRules& rules) {
    std::vector<TensorInfo> disk;
    const std::vector<Dtype> dtypes(wanted.size(), Dtype::kF32);
    for (const auto& tensor : fresh_tensors(wanted, dtypes, rules)) disk.push_back(tensor.disk);
    EXPECT_EQ(map_weights("folder", disk, wanted, rules).size(), disk.size());
    return disk;
  };
  EXPECT_EQ(fresh(kExperts, kRules).size(), 6u);
  EXPECT_EQ(fresh(kWanted, kRules)[0].name, "model.embed.weight");
  const auto rows = fresh({{"ngram.weight", {24, 3}}}, kRules);
  ASSERT_EQ(rows.size(), 12u);
  EXPECT_EQ(rows[11].name, "ngram.shard_11.weight");
  EXPECT_EQ(rows[11].shape, (std::vector<std::int64_t>{2, 3}));
  const auto joined = fresh(kJoined, kInterleaved);
  ASSERT_EQ(joined.size(), 1u);
  EXPECT_EQ(joined[0].name, "model.0.attn.qkvz.weight");
  EXPECT_EQ(joined[0].shape, (std::vector<std::int64_t>{12, 5}));
  EXPECT_EQ(joined[0].dtype, Dtype::kF32);
}

TEST(WeightMap, OfACroppedParameterTheFirstRowsAreTaken) {
  auto rules = kRules;
  rules.cropped = {"*.mlp.experts.*"};
  const std::vector<TensorInfo> fused = {bf16("model.mlp.experts.gate_up_proj", {3, 6, 4}),
                                         bf16("model.mlp.experts.down_proj", {3, 4, 3})};
  const auto taken = map_weights("folder", fused, kExperts, rules);
  EXPECT_EQ(taken[0].disk.shape, kExperts[0].shape);
  EXPECT_EQ(taken[0].runs.at(0).elements, 2 * 6 * 4);
  EXPECT_THAT(error(fused, kExperts), HasSubstr("of another shape"));  // without the rule

  std::vector<TensorInfo> split;
  for (const auto* part : {"gate_proj", "up_proj", "down_proj"}) {
    for (int expert = 0; expert < 3; ++expert) {
      const bool down = std::string_view(part) == "down_proj";
      split.push_back(bf16(fmt::format("model.mlp.experts.{}.{}.weight", expert, part),
                           down ? std::vector<std::int64_t>{4, 3} : std::vector<std::int64_t>{3, 4}));
    }
  }
  for (const auto& tensor : map_weights("folder", split, kExperts, rules)) {
    const bool cut_off = tensor.disk.name.find(".2.") != std::string::npos;
    EXPECT_EQ(tensor.runs.empty(), cut_off) << tensor.disk.name;
    EXPECT_EQ(tensor.exported, !cut_off) << tensor.disk.name;
  }
}

TEST(WeightMap, FusedExpertsAreKnownAsPiecesToo) {
  const auto whole = map({bf16("model.language_model.mlp.experts.gate_up_proj", {2, 6, 4}),
                          bf16("model.language_model.mlp.experts.down_proj", {2, 4, 3})},
                         kExperts);
  const auto pieces = in_pieces(whole[0], kExperts, kRules);
  ASSERT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[3].disk.name, "model.language_model.mlp.experts.1.up_proj.weight");
  EXPECT_EQ(pieces[3].disk.shape, (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(pieces[3].runs.at(0).offset, 36);
  EXPECT_TRUE(
      in_pieces(map({bf16("model.embed.weight", {10, 4}), bf16("model.layers.0.A_log", {2})})[0], kWanted, kRules)
          .empty());
}

}  // namespace
}  // namespace sluice
