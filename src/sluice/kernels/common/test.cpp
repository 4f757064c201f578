// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <gtest/gtest.h>

#include <limits>

#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/matmul.h"
#include "sluice/kernels/common/testing.h"

namespace sluice {
namespace {

TEST(ExpNonpositive, StaysWithinItsBound) {
  for (int i = 0; i < 27'500; ++i) {
    const float x = -0.00317F * static_cast<float>(i);
    EXPECT_NEAR(exp_nonpositive(x) / std::exp(static_cast<double>(x)), 1, 2e-7) << x;
  }
  EXPECT_EQ(exp_nonpositive(0.F), 1);
  EXPECT_EQ(exp_nonpositive(-1e4F), 0);
  EXPECT_EQ(exp_nonpositive(-std::numeric_limits<float>::infinity()), 0);
  EXPECT_TRUE(std::isnan(exp_nonpositive(std::numeric_limits<float>::quiet_NaN())));
}

struct Sizes {
  std::int64_t m, k, n;
};
constexpr Sizes kSizes[] = {{1, 1, 1},      {64, 32, 64},   {3, 7, 5},       {65, 33, 63}, {130, 70, 129}, {1, 600, 64},
                            {70, 1030, 65}, {64, 512, 128}, {200, 544, 300}, {5, 0, 3},    {1000, 64, 3}};

// Every layout of the operands, added to a c that is part of a wider matrix. Products of bfloat16 are exact in float32;
// sums of k terms of size 1 lose at most k 2^-24 of the largest partial sum, 1e-6 relative in norm here.
void expect_matmul(at::ScalarType type, double bound) {
  for (const auto& [m, k, n] : kSizes) {
    const auto options = at::TensorOptions().dtype(type);
    for (int layouts = 0; layouts < 16; ++layouts) {
      const bool a_transposed = layouts & 1, b_transposed = layouts & 2, c_transposed = layouts & 4,
                 accumulate = layouts & 8;
      SCOPED_TRACE(
          fmt::format("{} x {} x {} {} {} {} {}", m, k, n, a_transposed, b_transposed, c_transposed, accumulate));
      const auto a = a_transposed ? at::randn({k, m}, options).t() : at::randn({m, k}, options);
      const auto b = b_transposed ? at::randn({n, k}, options).t() : at::randn({k, n}, options);
      const auto width = c_transposed ? m : n;  // of c as it lies
      const auto wide = at::randn({c_transposed ? n : m, width + 3}, options.dtype(type == kDouble ? kDouble : kFloat));
      const auto before = wide.clone();
      const auto c_of = [&](const Tensor& x) {
        const auto part = x.narrow(1, 1, width);
        return c_transposed ? part.t() : part;
      };
      matmul_into(c_of(wide), a, b, accumulate);
      auto want = a.to(kDouble).mm(b.to(kDouble));
      if (accumulate) want = want + c_of(before);
      EXPECT_LT(relative_error(c_of(wide), want), bound);
      EXPECT_TRUE(wide.select(1, 0).equal(before.select(1, 0)));
      EXPECT_TRUE(wide.narrow(1, width + 1, 2).equal(before.narrow(1, width + 1, 2)));
    }
  }
}

TEST(MatmulInto, MatchesFloat64) {
  at::manual_seed(1);
  expect_matmul(kDouble, 1e-14);
  expect_matmul(kFloat, 1e-6);
  expect_matmul(kBFloat16, 1e-6);
}

// Where there is a matrix unit a row has its bits whatever the others; elsewhere two orders of a sum of 700 terms may
// differ by sqrt(700) 2^-24 of its norm.
void expect_equal_rows(const Tensor& x, const Tensor& y) {
  if (at::native::cpublas::could_pack(kBFloat16)) EXPECT_TRUE(x.equal(y));
  else EXPECT_LT(relative_error(x, y.to(kDouble)), 1.6e-6);
}

TEST(MatmulInto, GivesTheSameBitsInsideAndOutsideOfAParallelRegion) {
  at::manual_seed(2);
  const auto a = at::randn({130, 700}).to(kBFloat16), b = at::randn({500, 700}).to(kBFloat16);
  const auto outside = at::empty({130, 500}), row = at::empty({1, 500});
  matmul_into(outside, a, b.t(), false);
  std::vector<Tensor> inside{at::empty({130, 500}), at::empty({130, 500})};
  at::parallel_for(0, 2, 1, [&](std::int64_t first, std::int64_t last) {
    for (auto i = first; i < last; ++i) matmul_into(inside[i], a, b.t(), false);
  });
  EXPECT_TRUE(inside[0].equal(outside));
  EXPECT_TRUE(inside[1].equal(outside));
  matmul_into(row, a.narrow(0, 77, 1), b.t(), false);
  expect_equal_rows(row, outside.narrow(0, 77, 1));
}

// Products and sums of the two are the same ones in the same order.
TEST(MatmulInto, OfTheTransposedOperandsGivesTheTransposedBits) {
  at::manual_seed(3);
  for (const std::int64_t rows : {1, 17, 130}) {
    const auto a = at::randn({rows, 700}).to(kBFloat16), b = at::randn({3000, 700}).to(kBFloat16);
    const auto c = at::empty({rows, 3000}), turned = at::empty({3000, rows});
    matmul_into(c, a, b.t(), false);
    matmul_into(turned, b, a.t(), false);
    SCOPED_TRACE(rows);
    expect_equal_rows(turned.t(), c);
  }
}

// Sums of 257 terms lose at most sqrt(257) 2^-24 of their norm; a bfloat16 result is rounded to 2^-9.
TEST(TimesWeight, OfFewRowsAndOfManyMatchesFloat64) {
  at::manual_seed(4);
  for (const auto type : {kFloat, kBFloat16}) {
    for (const std::int64_t rows : {1, 3, 4, 5, 70}) {
      SCOPED_TRACE(fmt::format("{} rows, {}", rows, c10::toString(type)));
      const auto wide = at::randn({rows, 300}).to(type), weight = at::randn({65, 257}).to(type);
      const auto x = wide.narrow(1, 7, 257);
      const auto y = times_weight(x, weight);
      EXPECT_EQ(y.scalar_type(), type);
      EXPECT_LT(relative_error(y, x.to(kDouble).mm(weight.to(kDouble).t())), type == kFloat ? 1e-6 : 3e-3);
    }
  }
}

TEST(TimesWeight, HasTheGradientsOfALinear) {
  at::manual_seed(5);
  const auto x = at::randn({2, 9}).requires_grad_(), weight = at::randn({5, 9}).requires_grad_();
  times_weight(x, weight).sum().backward();
  EXPECT_LT(relative_error(x.grad(), weight.detach().to(kDouble).sum(0).expand({2, 9})), 1e-6);
  EXPECT_LT(relative_error(weight.grad(), x.detach().to(kDouble).sum(0).expand({5, 9})), 1e-6);
}

}  // namespace
}  // namespace sluice
