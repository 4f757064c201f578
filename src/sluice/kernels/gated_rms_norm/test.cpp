// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/gated_rms_norm/cases.h"
#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"x", "gate", "weight"};
constexpr GateActivation kActivations[] = {GateActivation::kSilu, GateActivation::kSigmoid};
const auto kF64 = at::TensorOptions().dtype(kDouble);

struct Problem {
  std::vector<Tensor> inputs;   // x, gate, weight (float64)
  std::vector<Tensor> weights;  // of the output in the loss, exact in bfloat16
  double eps;
};

Problem draw(const GatedRmsNormCase& c) {
  const std::vector<std::int64_t> shape{c.tokens, c.heads, c.value_dim};
  return {.inputs = {at::randn(shape, kF64), at::randn(shape, kF64) * c.gate_scale, at::randn({c.value_dim}, kF64)},
          .weights = {at::randn(shape, kF64).to(kBFloat16).to(kDouble)},
          .eps = c.eps};
}

Operator entry(double eps, decltype(gated_rms_norm)& function, GateActivation activation) {
  return [eps, &function, activation](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{function(x[0], x[1], x[2], eps, activation)};
  };
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound, double gradient_bound) {
  for (const auto activation : kActivations) {
    SCOPED_TRACE(activation == GateActivation::kSilu ? "silu" : "sigmoid");
    const auto inputs = to_type(p.inputs, type);
    const auto got = differentiate(entry(p.eps, gated_rms_norm, activation), inputs, p.weights);
    const auto want =
        differentiate(entry(p.eps, gated_rms_norm_definition, activation), to_type(inputs, kDouble), p.weights);
    EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), gradient_bound) << "gradient of " << kInputs[i];
    }
  }
}

TEST(GatedRmsNorm, MatchesItsDefinitionInFloat64) {
  for (const auto& c : gated_rms_norm_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    expect_equal_to_definition(draw(c), kDouble, 1e-12, 1e-12);
  }
}

// A handful of roundings of 6e-8 and an exponential within 3e-7; a sum over rows that partly cancels costs the weight's
// gradient one digit.
TEST(GatedRmsNorm, MatchesItsDefinitionInFloat32) {
  for (const auto& c : gated_rms_norm_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, 1e-6, 5e-6);
  }
}

// One rounding of each result to bfloat16, at most 2^-8 = 3.9e-3 relative, in the norm too.
TEST(GatedRmsNorm, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : gated_rms_norm_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, 3.91e-3, 3.91e-3);
  }
}

// Skipping the two inner roundings moves a bfloat16 result by no more than they could: 2^-8 each, and the last one.
TEST(GatedRmsNorm, StaysWithinTheRoundingsOfTheUnfusedReference) {
  at::manual_seed(4);
  const auto p = draw({"reference", 30, 4, 128});
  const auto in = to_type(p.inputs, kBFloat16);
  const auto x = in[0].to(kFloat), z = in[1].to(kFloat);
  const auto unit = (x * (x.square().mean(-1, true) + p.eps).rsqrt()).to(kBFloat16);
  const auto reference = ((in[2] * unit).to(kFloat) * z * z.sigmoid()).to(kBFloat16);
  const auto y = gated_rms_norm(in[0], in[1], in[2], p.eps, GateActivation::kSilu);
  EXPECT_LT(relative_error(y, reference), 4 * 3.91e-3);
}

TEST(GatedRmsNorm, AnOpenSigmoidLeavesThePlainNorm) {
  at::manual_seed(5);
  const auto x = at::randn({9, 2, 64}, kF64);
  const auto unit = x * (x.square().mean(-1, true) + 1e-6).rsqrt();
  const auto y = gated_rms_norm(x, at::full_like(x, 1e3), at::ones({64}, kF64), 1e-6, GateActivation::kSigmoid);
  EXPECT_LT(relative_error(y, unit), 1e-14);
}

TEST(GatedRmsNorm, PackedTokensEqualSeparateOnesBitForBit) {
  at::manual_seed(6);
  const auto p = draw({"rows", 50, 3, 257});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto all = differentiate(entry(p.eps, gated_rms_norm, GateActivation::kSilu), inputs, p.weights);
  for (const std::int64_t token : {0, 17, 49}) {
    const auto of = [token](const Tensor& x) { return x.narrow(0, token, 1); };
    const auto one = differentiate(entry(p.eps, gated_rms_norm, GateActivation::kSilu),
                                   {of(inputs[0]), of(inputs[1]), inputs[2]}, {of(p.weights[0])});
    EXPECT_TRUE(one.outputs[0].equal(of(all.outputs[0])));
    for (const int i : {0, 1}) EXPECT_TRUE(one.gradients[i].equal(of(all.gradients[i]))) << kInputs[i];
  }
}

// Columns of one projection, and every other element.
TEST(GatedRmsNorm, TakesAnyStrides) {
  at::manual_seed(7);
  const auto wide = at::randn({20, 3 * 128 + 5}, kF64), weight = at::randn({64}, kF64);
  const auto x = wide.narrow(1, 3, 128).view({20, 2, 64});
  for (const auto& gate :
       {wide.narrow(1, 200, 128).view({20, 2, 64}), at::randn({20, 2, 128}, kF64).slice(2, 0, 128, 2)}) {
    EXPECT_TRUE(gated_rms_norm(x, gate, weight, 1e-6, GateActivation::kSilu)
                    .equal(gated_rms_norm(x.contiguous(), gate.contiguous(), weight, 1e-6, GateActivation::kSilu)));
  }
}

TEST(GatedRmsNorm, GradientBitsDoNotDependOnThreads) {
  at::manual_seed(8);
  const auto p = draw({"threads", 1500, 2, 33});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto threads = at::get_num_threads();
  const auto many = differentiate(entry(p.eps, gated_rms_norm, GateActivation::kSilu), inputs, p.weights);
  at::set_num_threads(1);
  const auto one = differentiate(entry(p.eps, gated_rms_norm, GateActivation::kSilu), inputs, p.weights);
  at::set_num_threads(threads);
  for (const int i : {0, 1, 2}) EXPECT_TRUE(one.gradients[i].equal(many.gradients[i])) << kInputs[i];
}

TEST(GatedRmsNorm, ZeroAndExtremeValuesStayFinite) {
  for (const auto activation : kActivations) {
    for (const auto type : {kFloat, kBFloat16}) {
      for (const double value : {0., 1e-38, 1e18, 3e38}) {
        for (const double gate : {0., 89., -89., 1e10, -1e10, -3e38}) {
          SCOPED_TRACE(fmt::format("x {} gate {}", value, gate));
          const auto x = at::full({2, 1, 40}, value, at::TensorOptions().dtype(type));
          const auto got =
              differentiate(entry(1e-6, gated_rms_norm, activation),
                            {x, at::full_like(x, gate), at::ones({40}, x.options())}, {at::randn({2, 1, 40}, kF64)});
          EXPECT_TRUE(at::isfinite(got.outputs[0]).all().item<bool>());
          for (const auto& gradient : got.gradients) EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
        }
      }
    }
  }
}

TEST(GatedRmsNorm, ANanComesThrough) {
  auto gate = at::ones({1, 1, 40});
  gate[0][0][3] = std::nanf("");
  for (const auto activation : kActivations) {
    const auto y = gated_rms_norm(at::ones({1, 1, 40}), gate, at::ones({40}), 1e-6, activation);
    EXPECT_TRUE(at::isnan(y).nonzero().select(1, 2).equal(at::tensor({3}, at::TensorOptions().dtype(kLong))));
  }
}

TEST(GatedRmsNorm, RefusesWhatItCannotMean) {
  const auto x = at::ones({3, 2, 8}), weight = at::ones({8});
  EXPECT_THAT([&] { gated_rms_norm(x, x.narrow(1, 0, 1), weight, 1e-6, GateActivation::kSilu); },
              ThrowsMessage<Error>(HasSubstr("gate must have the shape and dtype of x; got x [3, 2, 8] Float")));
  EXPECT_THAT([&] { gated_rms_norm(x, x, at::ones({7}), 1e-6, GateActivation::kSilu); },
              ThrowsMessage<Error>(HasSubstr("x must be [T, H, V] and weight [V]")));
  EXPECT_THAT([&] { gated_rms_norm(x, x, weight, 0, GateActivation::kSilu); },
              ThrowsMessage<Error>(HasSubstr("eps must be positive")));
}

}  // namespace
}  // namespace sluice
