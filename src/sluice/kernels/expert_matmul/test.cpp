// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/expert_matmul/cases.h"
#include "sluice/kernels/expert_matmul/expert_matmul.h"

namespace sluice {
namespace {

// Which of the operands is addressed by row: x of the products that enter the experts, the result of those that leave.
enum class Rows { kNone, kOfX, kOfOut, kBoth };

struct Problem {
  std::vector<Tensor> inputs;   // x, weight (float64)
  std::vector<Tensor> weights;  // of the result in the loss
  ExpertMatmulLines lines;
  std::optional<Tensor> x_rows, out_rows;
  std::int64_t out_size;
};

Problem draw(const ExpertMatmulCase& c, Rows rows) {
  const auto f64 = at::TensorOptions().dtype(kDouble);
  Problem p{.inputs = {}, .weights = {}, .lines = draw_lines(c), .x_rows = {}, .out_rows = {}, .out_size = 0};
  const auto count = c.tokens * c.visits;
  if (rows == Rows::kOfX || rows == Rows::kBoth) p.x_rows = p.lines.tokens;
  if (rows == Rows::kOfOut || rows == Rows::kBoth) p.out_rows = p.lines.tokens;
  p.out_size = p.out_rows ? c.tokens : count;
  p.inputs = {at::randn({p.x_rows ? c.tokens : count, c.in}, f64),
              at::randn({c.experts, c.out, c.in}, f64) / std::sqrt(static_cast<double>(c.in))};
  p.weights = {at::randn({p.out_size, c.out}, f64)};
  return p;
}

Operator entry(const Problem& p, decltype(expert_matmul)& function) {
  return [&p, &function](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{function(x[0], x[1], p.lines.offsets, p.x_rows, p.out_rows, p.out_size)};
  };
}

void expect_equal_to_definition(at::ScalarType type, double bound) {
  for (const auto& c : expert_matmul_cases()) {
    for (const auto rows : {Rows::kNone, Rows::kOfX, Rows::kOfOut, Rows::kBoth}) {
      SCOPED_TRACE(c.name + ", rows " + std::to_string(static_cast<int>(rows)));
      at::manual_seed(1);
      const auto p = draw(c, rows);
      const auto inputs = to_type(p.inputs, type), weights = to_type(p.weights, type);
      const auto got = differentiate(entry(p, expert_matmul), inputs, weights);
      const auto want = differentiate(entry(p, expert_matmul_definition), to_type(inputs, kDouble), weights);
      EXPECT_EQ(got.outputs[0].scalar_type(), type);
      EXPECT_EQ(got.outputs[0].sizes(), want.outputs[0].sizes());
      EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
      EXPECT_LE(relative_error(got.gradients[0], want.gradients[0]), bound) << "gradient of x";
      EXPECT_LE(relative_error(got.gradients[1], want.gradients[1]), bound) << "gradient of weight";
    }
  }
}

TEST(ExpertMatmul, MatchesItsDefinitionInFloat64) { expect_equal_to_definition(kDouble, 1e-13); }

// The rounding of a sum of n random terms grows as sqrt(n) 2^-24 at most, 1e-6 for the 300 of the longest.
TEST(ExpertMatmul, MatchesItsDefinitionInFloat32) { expect_equal_to_definition(kFloat, 2e-6); }

// Products of bfloat16 are exact in float32; each result is rounded once, by at most 2^-9 = 2e-3 of itself. The
// incoming gradient is exact.
TEST(ExpertMatmul, MatchesItsDefinitionInBfloat16) { expect_equal_to_definition(kBFloat16, 3e-3); }

TEST(ExpertMatmul, AnExpertWithoutLinesIsNotTouched) {
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(2);
    const auto p = draw({"unused", 8, 16, 24, 20, 2, 4}, Rows::kOfX);
    auto inputs = to_type(p.inputs, type);
    inputs[1].narrow(0, 4, 4).fill_(std::numeric_limits<double>::quiet_NaN());
    const auto got = differentiate(entry(p, expert_matmul), inputs, to_type(p.weights, type));
    EXPECT_TRUE(got.outputs[0].isfinite().all().item<bool>());
    EXPECT_TRUE(got.gradients[0].isfinite().all().item<bool>());
    EXPECT_TRUE(got.gradients[1].narrow(0, 4, 4).equal(at::zeros({4, 24, 16}, inputs[1].options())));
    EXPECT_GT(got.gradients[1].narrow(0, 0, 4).abs().sum().item<double>(), 0);
  }
}

TEST(ExpertMatmul, RowsThatNoLineNamesAreZero) {
  const auto offsets = at::tensor({0, 1, 2}, at::TensorOptions().dtype(kInt));
  const auto rows = at::tensor({3, 1}, at::TensorOptions().dtype(kLong));
  const auto out = expert_matmul(at::ones({2, 4}), at::ones({2, 3, 4}), offsets, std::nullopt, rows, 5);
  EXPECT_TRUE(out.equal(at::tensor({0.F, 4.F, 0.F, 4.F, 0.F}).unsqueeze(1).expand({5, 3})));
}

// Only what needs a gradient gets one; the other's is the same, bit for bit.
TEST(ExpertMatmul, FrozenExpertsAndFrozenInputsAreLeftAlone) {
  at::manual_seed(3);
  const auto p = draw({"frozen", 8, 16, 24, 20, 2}, Rows::kOfX);
  const auto inputs = to_type(p.inputs, kFloat);
  const auto both = differentiate(entry(p, expert_matmul), inputs, p.weights);
  for (const int trained : {0, 1}) {
    std::vector<Tensor> leaves{inputs[0].clone(), inputs[1].clone()};
    leaves[trained].requires_grad_();
    (entry(p, expert_matmul)(leaves)[0].to(kDouble) * p.weights[0]).sum().backward();
    EXPECT_TRUE(leaves[trained].grad().equal(both.gradients[trained]));
    EXPECT_FALSE(leaves[1 - trained].grad().defined());
  }
}

// In bfloat16 on the matrix unit to the last bit; in float32 products of other heights may add in another order.
TEST(ExpertMatmul, ATokenDoesNotDependOnTheOthers) {
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(4);
    const auto p = draw({"alone", 4, 64, 96, 40, 2}, Rows::kBoth);
    const auto inputs = to_type(p.inputs, type);
    const auto all = entry(p, expert_matmul)(inputs)[0];
    const auto lines = p.lines.tokens.eq(7).nonzero().squeeze(1);
    const auto offsets = at::searchsorted(lines, p.lines.offsets.to(kLong)).to(kInt);
    const auto zeros = at::zeros({2}, lines.options());
    const auto alone = expert_matmul(inputs[0].narrow(0, 7, 1), inputs[1], offsets, zeros, zeros, 1);
    EXPECT_LT(relative_error(alone, all.narrow(0, 7, 1)), type == kFloat ? 1e-6 : 1e-9);
  }
}

TEST(ExpertMatmul, TheSameInputsGiveTheSameBits) {
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(5);
    const auto p = draw({"twice", 16, 64, 96, 300, 4}, Rows::kBoth);
    const auto inputs = to_type(p.inputs, type);
    const auto first = differentiate(entry(p, expert_matmul), inputs, p.weights),
               second = differentiate(entry(p, expert_matmul), inputs, p.weights);
    EXPECT_TRUE(first.outputs[0].equal(second.outputs[0]));
    for (const int i : {0, 1}) EXPECT_TRUE(first.gradients[i].equal(second.gradients[i]));
  }
}

TEST(ExpertMatmul, RefusesWhatItCannotMean) {
  const auto i32 = at::TensorOptions().dtype(kInt), i64 = at::TensorOptions().dtype(kLong);
  const auto x = at::ones({4, 8}), weight = at::ones({2, 3, 8});
  const auto offsets = at::tensor({0, 1, 4}, i32), rows = at::tensor({0, 1, 2, 3}, i64);
  const auto expect_error = [&](const std::string& part, const auto&... arguments) {
    try {
      expert_matmul(arguments...);
      FAIL() << "expected an error with: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  const auto none = std::optional<Tensor>();
  expect_error("of one dtype", x, weight.to(kBFloat16), offsets, none, none, 4);
  expect_error("weight [E, out, in]", x, at::ones({2, 3, 7}), offsets, none, none, 4);
  expect_error("int32 [E + 1 = 3]", x, weight, at::tensor({0, 4}, i32), none, none, 4);
  expect_error("begin with 0", x, weight, at::tensor({1, 2, 4}, i32), none, none, 4);
  expect_error("fall from 3 to 2 at expert 1", x, weight, at::tensor({0, 3, 2}, i32), none, none, 4);
  expect_error("a row for each of the 3 lines", x, weight, at::tensor({0, 1, 3}, i32), none, none, 3);
  expect_error("x_rows at line 2 is 4, of 4 rows", x, weight, offsets, std::optional(at::tensor({0, 1, 4, 3}, i64)),
               none, 4);
  expect_error("out_rows at line 0 is -1", x, weight, offsets, none, std::optional(at::tensor({-1, 1, 2, 3}, i64)), 4);
  expect_error("out_rows has 2 entries", x, weight, offsets, none, std::optional(rows.narrow(0, 0, 2)), 4);
  expect_error("x_rows must be int64", x, weight, offsets, std::optional(rows.to(kInt)), none, 4);
}

}  // namespace
}  // namespace sluice
