// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/fp8.h"

#include <gtest/gtest.h>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

constexpr BlockSize kBlock{.rows = 128, .columns = 128};

// Each element by its own block, one after the other.
double scale_at(const Tensor& scales, std::int64_t row, std::int64_t column) {
  return scales[row / kBlock.rows][column / kBlock.columns].item<double>();
}

TEST(Fp8, BlocksAtTheEdgesAreSmaller) {
  at::manual_seed(1);
  const auto weight = at::randn({1000, 300});
  const auto scales = fp8_scales(weight, kBlock);
  ASSERT_EQ(scales.sizes(), (at::IntArrayRef{8, 3}));
  ASSERT_EQ(scales.scalar_type(), kBFloat16);
  for (std::int64_t i = 0; i < 8; ++i) {
    for (std::int64_t j = 0; j < 3; ++j) {
      const auto rows = std::min<std::int64_t>(128, 1000 - 128 * i),
                 columns = std::min<std::int64_t>(128, 300 - 128 * j);
      const auto largest = weight.narrow(0, 128 * i, rows).narrow(1, 128 * j, columns).abs().max().item<double>();
      EXPECT_NEAR(scales[i][j].item<double>() * 448 / largest, 1, 1.0 / 256);  // a bfloat16 has 8 bits
    }
  }
}

TEST(Fp8, ANormalElementKeepsItsValueWithinASixteenth) {
  at::manual_seed(2);
  const auto weight = at::randn({200, 130});
  const auto scales = fp8_scales(weight, kBlock);
  const auto stored = fp8_quantized(weight, scales, kBlock);
  ASSERT_EQ(stored.scalar_type(), at::kFloat8_e4m3fn);
  const auto values = fp8_values(stored, scales, kBlock, kFloat);
  for (std::int64_t row = 0; row < 200; ++row) {
    for (std::int64_t column = 0; column < 130; ++column) {
      const auto exact = weight[row][column].item<double>(), scale = scale_at(scales, row, column);
      const auto smallest_step = scale / 512;
      EXPECT_LE(std::abs(values[row][column].item<double>() - exact), std::max(std::abs(exact) / 16, smallest_step / 2))
          << row << " " << column;
    }
  }
}

TEST(Fp8, ABlockOfZerosStaysZero) {
  const auto weight = at::zeros({128, 256});
  weight[3][200] = 1e-30;  // the second block's largest
  const auto scales = fp8_scales(weight, kBlock);
  EXPECT_EQ(scales[0][0].item<double>(), 1);
  const auto values = fp8_values(fp8_quantized(weight, scales, kBlock), scales, kBlock, kFloat);
  EXPECT_EQ(values.narrow(1, 0, 128).abs().max().item<double>(), 0);
  EXPECT_NEAR(values[3][200].item<double>(), 1e-30, 1e-32);
}

// The largest element of a block is stored as 448, so a second round gives the same scales and bits.
TEST(Fp8, WhatWasQuantisedOnceStaysAsItIs) {
  at::manual_seed(3);
  const auto weight = at::randn({3, 150, 260});  // of three experts
  const auto scales = fp8_scales(weight, kBlock);
  ASSERT_EQ(scales.sizes(), (at::IntArrayRef{3, 2, 3}));
  const auto values = fp8_values(fp8_quantized(weight, scales, kBlock), scales, kBlock, kFloat);
  const auto again = fp8_scales(values, kBlock);
  EXPECT_TRUE(again.equal(scales));
  EXPECT_TRUE(fp8_values(fp8_quantized(values, again, kBlock), again, kBlock, kFloat).equal(values));
  EXPECT_TRUE(fp8_scales(weight[1], kBlock).equal(scales[1]));
}

TEST(Fp8, OneScaleIsThatOfTheWholeTensor) {
  const auto stored = at::tensor({1.0, -2.0, 448.0}).to(at::kFloat8_e4m3fn);
  EXPECT_TRUE(
      fp8_values(stored, at::tensor({0.5}, kFloat), kBlock, kFloat).equal(at::tensor({0.5, -1.0, 224.0}, kFloat)));
}

}  // namespace
}  // namespace sluice
