// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/tensor_parts.h"

#include <gmock/gmock.h>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

// The tensor [rows, 4] in parts of these boxes.
TensorParts in_parts(const Tensor& whole, const std::vector<Box>& boxes) {
  TensorParts tensor{.name = "w", .shape = whole.sizes().vec(), .parts = {}};
  for (const auto& box : boxes) {
    tensor.parts.push_back(
        {box, rows_view(whole).narrow(0, box.row, box.rows).narrow(1, box.column, box.columns).contiguous()});
  }
  return tensor;
}

TEST(TensorParts, AnyBoxIsReadOutOfAnyParts) {
  const auto whole = at::arange(24, kFloat).view({6, 4});
  const auto parts = in_parts(whole, {{0, 6, 0, 1}, {0, 2, 1, 3}, {2, 4, 1, 2}, {2, 4, 3, 1}});
  EXPECT_TRUE(assemble(parts).equal(whole));
  const auto to = at::zeros({3, 2});
  copy_boxes(parts, {{1, 2, 0, 2}, {5, 1, 2, 2}}, to);
  EXPECT_TRUE(to.equal(at::tensor({4.F, 5.F, 8.F, 9.F, 22.F, 23.F}).view({3, 2})));
}

TEST(TensorParts, AWholeTensorIsNotCopied) {
  const auto whole = at::arange(24, kFloat).view({2, 3, 4});
  const auto same = assemble(whole_tensor("w", whole));
  EXPECT_EQ(same.const_data_ptr(), whole.const_data_ptr());
  EXPECT_EQ(same.sizes(), whole.sizes());
}

TEST(TensorParts, HolesAndStraysAreErrors) {
  const auto whole = at::arange(24, kFloat).view({6, 4});
  EXPECT_THAT(data_error([&] { assemble(in_parts(whole, {{0, 5, 0, 4}})); }), HasSubstr("20 of the 24 elements"));
  auto stray = in_parts(whole, {{0, 6, 0, 4}, {0, 1, 0, 1}});
  stray.parts[1].box.column = 4;
  EXPECT_THAT(data_error([&] { assemble(stray); }), HasSubstr("outside the tensor [6, 4]"));
}

TEST(TensorParts, NamesSayWhereAPartBelongs) {
  const auto whole = at::arange(24, kFloat).view({2, 3, 4});
  const auto parts = in_parts(whole, {{0, 6, 0, 4}, {4, 2, 1, 3}});
  EXPECT_EQ(part_name(parts, parts.parts[0]), "w");
  EXPECT_EQ(part_name(parts, parts.parts[1]), "w of [2, 3, 4] at 4,1");
  const std::vector<std::int64_t> stored{2, 3};
  const auto parsed = parse_part_name("w of [2, 3, 4] at 4,1", stored);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->tensor, "w");
  EXPECT_EQ(parsed->shape, parts.shape);
  EXPECT_EQ(parsed->box.row, 4);
  EXPECT_EQ(parsed->box.columns, 3);
  for (const auto* name : {"w of [2, 3 at 4,1", "w of [2, x] at 4,1", "w of [2, 3] at 4", "w of [2, 3] at -4,1",
                           "w of [4611686018427387904, 4] at 0,0"}) {
    EXPECT_FALSE(parse_part_name(name, stored)) << name;
  }
}

}  // namespace
}  // namespace sluice
