// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/rms_norm/cases.h"
#include "sluice/kernels/rms_norm/rms_norm.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const auto kF64 = at::TensorOptions().dtype(kDouble);

struct Problem {
  std::vector<Tensor> inputs;   // x, weight (float64)
  std::vector<Tensor> weights;  // of the output in the loss, exact in bfloat16
  double eps;
};

Problem draw(const RmsNormCase& c) {
  return {.inputs = {at::randn(c.shape, kF64), at::randn({c.shape.back()}, kF64)},
          .weights = {at::randn(c.shape, kF64).to(kBFloat16).to(kDouble)},
          .eps = c.eps};
}

Operator entry(double eps, decltype(rms_norm)& function, bool zero_centered) {
  return [eps, &function, zero_centered](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{function(x[0], x[1], eps, zero_centered)};
  };
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound, double gradient_bound) {
  for (const bool zero_centered : {true, false}) {
    SCOPED_TRACE(zero_centered ? "weight around 0" : "weight around 1");
    const auto inputs = to_type(p.inputs, type);
    const auto got = differentiate(entry(p.eps, rms_norm, zero_centered), inputs, p.weights);
    const auto want =
        differentiate(entry(p.eps, rms_norm_definition, zero_centered), to_type(inputs, kDouble), p.weights);
    EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
    EXPECT_LE(relative_error(got.gradients[0], want.gradients[0]), gradient_bound) << "gradient of x";
    EXPECT_LE(relative_error(got.gradients[1], want.gradients[1]), gradient_bound) << "gradient of weight";
  }
}

TEST(RmsNorm, MatchesItsDefinitionInFloat64) {
  for (const auto& c : rms_norm_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    expect_equal_to_definition(draw(c), kDouble, 1e-12, 1e-12);
  }
}

// A handful of roundings of 6e-8 each; a sum over rows that partly cancels costs the weight's gradient one digit.
TEST(RmsNorm, MatchesItsDefinitionInFloat32) {
  for (const auto& c : rms_norm_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, 1e-6, 5e-6);
  }
}

// Rounding a result to bfloat16 costs at most 2^-8 = 3.9e-3 relative, in the norm too; the plain weight rounds twice.
TEST(RmsNorm, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : rms_norm_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, 2 * 3.91e-3, 3.91e-3);
  }
}

// 1 + 0.001 is 1 in bfloat16; here the factor is formed in float32 and meets one rounding, at the end.
TEST(RmsNorm, SmallZeroCenteredWeightIsNotLost) {
  at::manual_seed(4);
  const auto x = at::randn({8, 256}, kF64).to(kBFloat16);
  const auto weight = at::full({256}, 0.001, kF64).to(kBFloat16);
  const auto unit = x.to(kDouble) * (x.to(kDouble).square().mean(-1, true) + 1e-6).rsqrt();
  const auto y = rms_norm(x, weight, 1e-6, true);
  EXPECT_TRUE(y.equal((unit * (1 + weight.to(kDouble))).to(kBFloat16)));
  EXPECT_FALSE(y.equal(unit.to(kBFloat16)));
}

TEST(RmsNorm, ZeroCenteredWeightOfZeroIsThePlainNorm) {
  at::manual_seed(5);
  const auto x = at::randn({9, 64}, kF64);
  const auto unit = x * (x.square().mean(-1, true) + 1e-6).rsqrt();
  EXPECT_LT(relative_error(rms_norm(x, at::zeros({64}, kF64), 1e-6, true), unit), 1e-14);
  EXPECT_LT(relative_error(rms_norm(x, at::ones({64}, kF64), 1e-6, false), unit), 1e-14);
}

TEST(RmsNorm, PlainWeightRoundsTheUnitRowFirst) {
  at::manual_seed(6);
  const auto x = at::randn({8, 256}, kF64).to(kBFloat16), weight = at::randn({256}, kF64).to(kBFloat16);
  EXPECT_TRUE(rms_norm(x, weight, 1e-6, false).equal(rms_norm_definition(x, weight, 1e-6, false)));
}

TEST(RmsNorm, KeepsAFloat32WeightBesideBfloat16Rows) {
  at::manual_seed(7);
  const auto p = draw({"mixed", {40, 96}});
  const std::vector<Tensor> inputs{p.inputs[0].to(kBFloat16), p.inputs[1].to(kFloat)};
  const auto got = differentiate(entry(p.eps, rms_norm, true), inputs, p.weights);
  const auto want = differentiate(entry(p.eps, rms_norm_definition, true), to_type(inputs, kDouble), p.weights);
  EXPECT_EQ(got.outputs[0].scalar_type(), kBFloat16);
  EXPECT_EQ(got.gradients[1].scalar_type(), kFloat);
  EXPECT_LT(relative_error(got.gradients[1], want.gradients[1]), 5e-6);
}

TEST(RmsNorm, RowsDoNotKnowTheirNeighbours) {
  at::manual_seed(8);
  const auto p = draw({"rows", {50, 257}});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto all = differentiate(entry(p.eps, rms_norm, true), inputs, p.weights);
  for (const std::int64_t row : {0, 17, 49}) {
    const auto one = differentiate(entry(p.eps, rms_norm, true), {inputs[0].narrow(0, row, 1), inputs[1]},
                                   {p.weights[0].narrow(0, row, 1)});
    EXPECT_TRUE(one.outputs[0].equal(all.outputs[0].narrow(0, row, 1)));
    EXPECT_TRUE(one.gradients[0].equal(all.gradients[0].narrow(0, row, 1)));
  }
}

// Heads inside columns of a wider projection, a transposed matrix, every other element, a repeated row.
TEST(RmsNorm, TakesAnyStrides) {
  at::manual_seed(9);
  const auto wide = at::randn({20, 3 * 64 + 5}, kF64), weight = at::randn({64}, kF64);
  const std::vector<Tensor> views{wide.narrow(1, 3, 128).view({20, 2, 64}),
                                  wide.narrow(1, 5, 64),
                                  at::randn({64, 20}, kF64).t(),
                                  at::randn({20, 128}, kF64).slice(1, 0, 128, 2),
                                  at::randn({1, 64}, kF64).expand({20, 64}),
                                  at::randn({4, 3, 5, 64}, kF64).permute({2, 0, 1, 3})};
  for (const auto& view : views) {
    SCOPED_TRACE(describe(view));
    EXPECT_TRUE(rms_norm(view, weight, 1e-6, true).equal(rms_norm(view.contiguous(), weight, 1e-6, true)));
  }
}

// One weight a head: the norm of each head alone.
TEST(RmsNorm, HeadsMayHaveWeightsOfTheirOwn) {
  at::manual_seed(11);
  const auto p = draw({"heads", {500, 3, 40}});
  const std::vector<Tensor> inputs{p.inputs[0], at::randn({3, 40}, kF64)};
  for (const bool zero_centered : {true, false}) {
    const auto all = differentiate(entry(p.eps, rms_norm, zero_centered), inputs, p.weights);
    const auto want = differentiate(entry(p.eps, rms_norm_definition, zero_centered), inputs, p.weights);
    EXPECT_LT(relative_error(all.outputs[0], want.outputs[0]), 1e-12);
    for (const int i : {0, 1}) EXPECT_LT(relative_error(all.gradients[i], want.gradients[i]), 1e-12);
    const auto one = differentiate(entry(p.eps, rms_norm, zero_centered), {inputs[0].select(1, 2), inputs[1][2]},
                                   {p.weights[0].select(1, 2)});
    EXPECT_TRUE(one.outputs[0].equal(all.outputs[0].select(1, 2)));
    EXPECT_TRUE(one.gradients[0].equal(all.gradients[0].select(1, 2)));
  }
}

TEST(RmsNorm, GradientBitsDoNotDependOnThreads) {
  at::manual_seed(10);
  const auto p = draw({"threads", {3000, 33}});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto threads = at::get_num_threads();
  const auto many = differentiate(entry(p.eps, rms_norm, true), inputs, p.weights);
  at::set_num_threads(1);
  const auto one = differentiate(entry(p.eps, rms_norm, true), inputs, p.weights);
  at::set_num_threads(threads);
  for (const int i : {0, 1}) EXPECT_TRUE(one.gradients[i].equal(many.gradients[i]));
}

TEST(RmsNorm, ZeroAndExtremeRowsStayFinite) {
  for (const auto type : {kFloat, kBFloat16}) {
    for (const double value : {0., 1e-38, 1e-20, 1e18, 1e20, 3e38}) {
      SCOPED_TRACE(value);
      const auto x = at::full({2, 40}, value, at::TensorOptions().dtype(type));
      const auto got =
          differentiate(entry(1e-6, rms_norm, true), {x, at::ones({40}, x.options())}, {at::randn({2, 40}, kF64)});
      EXPECT_TRUE(at::isfinite(got.outputs[0]).all().item<bool>());
      for (const auto& gradient : got.gradients) EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
    }
  }
}

TEST(RmsNorm, RefusesWhatItCannotMean) {
  const auto x = at::ones({3, 8}), weight = at::ones({8});
  EXPECT_THAT([&] { rms_norm(x, at::ones({7}), 1e-6, true); },
              ThrowsMessage<Error>(
                  HasSubstr("x must be [..., D] and weight [D], or [..., H, D] and [H, D]; got x [3, 8] Float")));
  EXPECT_THAT([&] { rms_norm(x, weight, 0, true); }, ThrowsMessage<Error>(HasSubstr("eps must be positive")));
  EXPECT_THAT([&] { rms_norm(x, weight.to(kBFloat16), 1e-6, true); },
              ThrowsMessage<Error>(HasSubstr("weight must have the dtype of x or float32")));
  EXPECT_THAT([&] { rms_norm(x.to(kLong), weight, 1e-6, true); },
              ThrowsMessage<Error>(HasSubstr("x must be float32, bfloat16 or float64")));
}

}  // namespace
}  // namespace sluice
