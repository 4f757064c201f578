// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/rotary/cases.h"
#include "sluice/kernels/rotary/rotary.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const auto kF64 = at::TensorOptions().dtype(kDouble);
const auto kI64 = at::TensorOptions().dtype(kLong);

struct Problem {
  std::vector<Tensor> inputs;   // x (float64)
  std::vector<Tensor> weights;  // of the output in the loss, exact in bfloat16
  RotaryTable table;
};

Problem draw(const RotaryCase& c) {
  const std::vector<std::int64_t> shape{c.tokens, c.heads, c.head_dim};
  return {.inputs = {at::randn(shape, kF64)},
          .weights = {at::randn(shape, kF64).to(kBFloat16).to(kDouble)},
          .table = rotary_table(at::randint(100000, {c.tokens}, kI64), 1e7, c.rotary_dim)};
}

Operator entry(const RotaryTable& table, decltype(rotary)& function) {
  return [&table, &function](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{function(x[0], table.cos, table.sin)};
  };
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound) {
  const auto inputs = to_type(p.inputs, type);
  const auto got = differentiate(entry(p.table, rotary), inputs, p.weights);
  const auto want = differentiate(entry(p.table, rotary_definition), to_type(inputs, kDouble), p.weights);
  EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
  EXPECT_LE(relative_error(got.gradients[0], want.gradients[0]), bound);
}

// Two products and a sum: three roundings of the arithmetic (1e-16, 6e-8), then one of bfloat16, 2^-8 = 3.9e-3.
TEST(Rotary, MatchesItsDefinition) {
  for (const auto& c : rotary_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    const auto p = draw(c);
    expect_equal_to_definition(p, kDouble, 1e-12);
    expect_equal_to_definition(p, kFloat, 2e-7);
    expect_equal_to_definition(p, kBFloat16, 3.91e-3);
  }
}

TEST(Rotary, PairsTheHalvesOfTheFirstDims) {  // a quarter turn: (x_j, x_{j + rd/2}) -> (-x_{j + rd/2}, x_j)
  const auto x = at::arange(6, kF64).view({1, 1, 6});
  const auto y = rotary(x, at::zeros({1, 2}), at::ones({1, 2}));
  EXPECT_TRUE(y.flatten().equal(at::tensor({-2., -3., 0., 1., 4., 5.}, kF64)));
}

TEST(Rotary, ScoresDependOnTheDistanceAlone) {
  at::manual_seed(2);
  const auto q = at::randn({1, 1, 64}, kF64), k = at::randn({1, 1, 64}, kF64);
  const auto at_position = [](const Tensor& x, std::int64_t position) {
    const auto table = rotary_table(at::full({1}, position, kI64), 10000, 64);
    return rotary(x, table.cos, table.sin);
  };
  const auto score = [&](std::int64_t i, std::int64_t j) {
    return (at_position(q, i) * at_position(k, j)).sum().item<double>();
  };
  EXPECT_NEAR(score(5, 3), score(105, 103), 1e-4);  // angles of about 100 are float32: 4e-6 each, 64 products
}

TEST(Rotary, BackwardTurnsBack) {
  at::manual_seed(3);
  const auto p = draw({"back", 12, 2, 32, 16});
  const auto turned = rotary(p.inputs[0], p.table.cos, p.table.sin);
  EXPECT_LT(relative_error(rotary(turned, p.table.cos, -p.table.sin), p.inputs[0]), 1e-6);  // cos^2 + sin^2 in float32
}

TEST(Rotary, TokensDoNotKnowTheirNeighbours) {
  at::manual_seed(4);
  const auto p = draw({"tokens", 40, 3, 66, 34});
  const auto x = p.inputs[0].to(kFloat);
  const auto all = rotary(x, p.table.cos, p.table.sin);
  for (const std::int64_t t : {0, 13, 39}) {
    const auto of = [t](const Tensor& tensor) { return tensor.narrow(0, t, 1); };
    EXPECT_TRUE(rotary(of(x), of(p.table.cos), of(p.table.sin)).equal(of(all)));
  }
}

TEST(Rotary, TakesAnyStrides) {
  at::manual_seed(5);
  const auto table = rotary_table(at::arange(20, kI64), 10000, 16);
  const auto wide = at::randn({20, 200}, kF64);
  for (const auto& view : {wide.narrow(1, 3, 64).view({20, 2, 32}), at::randn({2, 20, 32}, kF64).transpose(0, 1),
                           at::randn({20, 2, 64}, kF64).slice(2, 0, 64, 2)}) {
    EXPECT_TRUE(rotary(view, table.cos, table.sin).equal(rotary(view.contiguous(), table.cos, table.sin)));
  }
}

// The angle is the float32 product; at long positions its rounding is part of the model.
TEST(RotaryTable, FormsTheAngleInFloat32) {
  const std::int64_t positions[] = {0, 1, 5000, 262143};
  const auto table = rotary_table(at::tensor({0, 1, 5000, 262143}, kI64), 1e7, 64);
  for (int t = 0; t < 4; ++t) {
    for (int j = 0; j < 32; ++j) {
      const float exponent = static_cast<float>(2 * j) / 64.f;
      const float frequency = 1.f / static_cast<float>(std::pow(1e7, exponent));
      const float angle = static_cast<float>(positions[t]) * frequency;
      // A frequency up to three roundings of 6e-8 away and the product's own; cos itself within 1e-7.
      const double bound = static_cast<double>(positions[t]) * frequency * 3e-7 + 2e-7;
      EXPECT_NEAR(table.cos[t][j].item<double>(), std::cos(static_cast<double>(angle)), bound);
      EXPECT_NEAR(table.sin[t][j].item<double>(), std::sin(static_cast<double>(angle)), bound);
    }
  }
  EXPECT_EQ(table.cos[0].min().item<double>(), 1);
}

TEST(Rotary, RefusesWhatItCannotMean) {
  const auto x = at::ones({3, 2, 8}), cos = at::ones({3, 4});
  EXPECT_THAT(
      [&] {
        rotary(x, at::ones({3, 5}), at::ones({3, 5}));
      },
      ThrowsMessage<Error>(HasSubstr("cos [T, rd/2] with rd <= d; got x [3, 2, 8] Float, cos [3, 5] Float")));
  EXPECT_THAT([&] { rotary(x, cos, cos.to(kDouble)); }, ThrowsMessage<Error>(HasSubstr("shape and dtype of cos")));
  EXPECT_THAT([&] { rotary(x, cos.to(kBFloat16), cos.to(kBFloat16)); },
              ThrowsMessage<Error>(HasSubstr("cos and sin must be float32")));
  EXPECT_THAT([&] { rotary_table(at::arange(3, kI64), 10000, 5); },
              ThrowsMessage<Error>(HasSubstr("rotary_dim must be even")));
}

}  // namespace
}  // namespace sluice
