// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/split.h"

#include <gmock/gmock.h>

#include "sluice/core/error.h"
#include "sluice/core/testing.h"
#include "sluice/layers/gated_attention.h"
#include "sluice/layers/gated_delta_net.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

MeshPlace tensor_rank(std::int64_t rank, std::int64_t size) { return {.tensor = {rank, size}}; }

std::vector<std::int64_t> rows_of(const Parameter& parameter, const MeshPlace& place) {
  std::vector<std::int64_t> rows;
  for (const auto& box : boxes_of(parameter, place)) {
    for (auto row = box.row; row < box.row + box.rows; ++row) rows.push_back(row);
  }
  return rows;
}

GatedDeltaNetSizes delta_sizes() {
  return {.hidden_size = 8,
          .num_key_heads = 2,
          .num_value_heads = 4,
          .key_head_dim = 2,
          .value_head_dim = 2,
          .conv_kernel_dim = 4,
          .rms_norm_eps = 1e-6,
          .initializer_range = 0.02};
}

Parameter& named(const Module& module, const std::string& name) {
  for (auto* parameter : module.parameters()) {
    if (parameter->name == name) return *parameter;
  }
  throw std::out_of_range(name);
}

// Case P1.
TEST(Split, CutsFusedProjectionsAndTheConvolutionByHeads) {
  const GatedDeltaNet layer(delta_sizes());
  const std::vector<std::int64_t> first{0, 1, 4, 5, 8, 9, 10, 11}, second{2, 3, 6, 7, 12, 13, 14, 15};
  for (const auto* name : {"in_proj_qkv.weight", "conv1d.weight"}) {
    EXPECT_EQ(rows_of(named(layer, name), tensor_rank(0, 2)), first) << name;
    EXPECT_EQ(rows_of(named(layer, name), tensor_rank(1, 2)), second) << name;
  }
  EXPECT_EQ(rows_of(named(layer, "in_proj_z.weight"), tensor_rank(1, 2)), (std::vector<std::int64_t>{4, 5, 6, 7}));
  EXPECT_EQ(rows_of(named(layer, "A_log"), tensor_rank(1, 2)), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(local_shape(named(layer, "out_proj.weight"), tensor_rank(1, 2)), (std::vector<std::int64_t>{8, 4}));
  EXPECT_EQ(local_shape(named(layer, "conv1d.weight"), tensor_rank(0, 2)), (std::vector<std::int64_t>{8, 1, 4}));
}

TEST(Split, SharesKeyValueHeadsWhereThereAreFewerThanRanks) {
  const GatedAttention layer({.hidden_size = 8,
                              .num_attention_heads = 8,
                              .num_key_value_heads = 2,
                              .head_dim = 1,
                              .rms_norm_eps = 1e-6,
                              .initializer_range = 0.02});
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(rows_of(named(layer, "k_proj.weight"), tensor_rank(rank, 4)), std::vector{rank / 2}) << rank;
    EXPECT_EQ(rows_of(named(layer, "q_proj.weight"), tensor_rank(rank, 4)),
              (std::vector{4 * rank, 4 * rank + 1, 4 * rank + 2, 4 * rank + 3}));
  }
}

TEST(Split, PiecesOfAllRanksAreTheWholeOnce) {
  at::manual_seed(1);
  const std::vector<Parameter> parameters{
      {.name = "rows", .shape = {7, 5}, .split = Split::anywhere(0), .init = {}},
      {.name = "columns", .shape = {5, 7}, .split = Split::anywhere(1), .init = {}},
      {.name = "fewer than ranks", .shape = {2, 3}, .split = Split::anywhere(0), .init = {}},
      {.name = "parts", .shape = {24, 1, 2}, .split = Split::heads(0, 3, {6, 6, 12}), .init = {}},
      {.name = "vector", .shape = {9}, .split = Split::heads(0, 3), .init = {}},
  };
  for (const auto& parameter : parameters) {
    SCOPED_TRACE(parameter.name);
    const auto whole = at::randn(parameter.shape);
    auto rebuilt = at::full_like(whole, NAN);
    std::int64_t elements = 0;
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      const auto place = tensor_rank(rank, 3);
      const auto piece = rows_view(take_piece(whole, parameter, place));
      std::int64_t row = 0;
      for (const auto& box : boxes_of(parameter, place)) {
        rows_view(rebuilt)
            .narrow(0, box.row, box.rows)
            .narrow(1, box.column, box.columns)
            .copy_(piece.narrow(0, row, box.rows));
        row += box.rows;
      }
      elements += piece.numel();
    }
    EXPECT_TRUE(rebuilt.equal(whole));
    EXPECT_EQ(elements, whole.numel());
  }
}

TEST(Split, ExpertsGoOverTheirOwnAxis) {
  const Parameter experts{.name = "experts", .shape = {4, 3, 2}, .split = Split::experts(4), .init = {}};
  EXPECT_EQ(local_shape(experts, {.tensor = {1, 2}, .expert = {1, 2}}), (std::vector<std::int64_t>{2, 3, 2}));
  EXPECT_EQ(rows_of(experts, {.tensor = {1, 2}, .expert = {1, 2}}).front(), 6);
}

TEST(Split, InitialValuesArePiecesOfTheWhole) {
  GatedDeltaNet whole(delta_sizes()), piece(delta_sizes());
  initialize(whole.parameters(), kFloat, 3);
  initialize(piece.parameters(), kFloat, 3, tensor_rank(1, 2));
  for (std::size_t i = 0; i < whole.parameters().size(); ++i) {
    const auto& parameter = *whole.parameters()[i];
    EXPECT_TRUE(piece.parameters()[i]->value.equal(take_piece(parameter.value, parameter, tensor_rank(1, 2))))
        << parameter.name;
  }
}

// Case E1.
TEST(Split, RefusesRanksThatDoNotDivideTheHeadsAndSaysWhatDoes) {
  auto sizes = delta_sizes();
  sizes.num_key_heads = 16;
  sizes.num_value_heads = 32;
  const GatedDeltaNet linear(sizes);
  const GatedAttention softmax({.hidden_size = 8,
                                .num_attention_heads = 16,
                                .num_key_value_heads = 2,
                                .head_dim = 1,
                                .rms_norm_eps = 1e-6,
                                .initializer_range = 0.02});
  auto parameters = linear.parameters();
  for (auto* parameter : softmax.parameters()) parameters.push_back(parameter);
  check_splits(parameters, 4, 1);
  try {
    check_splits(parameters, 3, 1);
    ADD_FAILURE() << "3 ranks cannot share 16 heads";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("parallel.tp = 3: the 16 heads of"), HasSubstr("1, 2, 4, 8, 16")));
  }
}

}  // namespace
}  // namespace sluice
