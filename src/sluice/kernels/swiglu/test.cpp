// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/swiglu/cases.h"
#include "sluice/kernels/swiglu/swiglu.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"gate", "up"};
const auto kF64 = at::TensorOptions().dtype(kDouble);

Operator entry(decltype(swiglu)& function) {
  return [&function](const std::vector<Tensor>& x) { return std::vector<Tensor>{function(x[0], x[1])}; };
}

void expect_equal_to_definition(const SwiGluCase& c, at::ScalarType type, double bound) {
  SCOPED_TRACE(c.name);
  const std::vector<std::int64_t> shape{c.tokens, c.features};
  const auto inputs = to_type({at::randn(shape, kF64) * c.scale, at::randn(shape, kF64)}, type);
  const std::vector<Tensor> weights{at::randn(shape, kF64).to(kBFloat16)};
  const auto got = differentiate(entry(swiglu), inputs, weights);
  const auto want = differentiate(entry(swiglu_definition), to_type(inputs, kDouble), weights);
  EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
  for (const int i : {0, 1}) {
    EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), bound) << "gradient of " << kInputs[i];
  }
}

TEST(SwiGlu, MatchesItsDefinitionInFloat64) {
  at::manual_seed(1);
  for (const auto& c : swiglu_cases()) expect_equal_to_definition(c, kDouble, 1e-14);
}

// An exponential within 2e-7 and five roundings of 6e-8.
TEST(SwiGlu, MatchesItsDefinitionInFloat32) {
  at::manual_seed(2);
  for (const auto& c : swiglu_cases()) expect_equal_to_definition(c, kFloat, 1e-6);
}

// One rounding of each result to bfloat16, at most 2^-8 = 3.906e-3 relative, in the norm too.
TEST(SwiGlu, MatchesItsDefinitionInBfloat16) {
  at::manual_seed(3);
  for (const auto& c : swiglu_cases()) expect_equal_to_definition(c, kBFloat16, 3.91e-3);
}

TEST(SwiGlu, TakesColumnsOfOneProjectionAndAnyStrides) {
  at::manual_seed(4);
  const auto both = at::randn({30, 130}), spread = at::randn({30, 130}).slice(1, 0, 130, 2);
  const auto gate = both.narrow(1, 0, 65), up = both.narrow(1, 65, 65);
  EXPECT_TRUE(swiglu(gate, up).equal(swiglu(gate.contiguous(), up.contiguous())));
  EXPECT_TRUE(swiglu(spread, up).equal(swiglu(spread.contiguous(), up.contiguous())));
}

TEST(SwiGlu, PackedTokensEqualSeparateOnesBitForBit) {
  at::manual_seed(5);
  const auto gate = at::randn({50, 257}), up = at::randn({50, 257});
  const auto all = swiglu(gate, up);
  for (const std::int64_t token : {0, 17, 49}) {
    EXPECT_TRUE(swiglu(gate.narrow(0, token, 1), up.narrow(0, token, 1)).equal(all.narrow(0, token, 1)));
  }
}

TEST(SwiGlu, NoTokensGiveNoTokens) {
  const auto got = differentiate(entry(swiglu), {at::ones({0, 8}), at::ones({0, 8})}, {at::ones({0, 8})});
  EXPECT_EQ(got.outputs[0].sizes(), (std::vector<std::int64_t>{0, 8}));
  EXPECT_EQ(got.gradients[0].sizes(), (std::vector<std::int64_t>{0, 8}));
}

TEST(SwiGlu, ExtremeGatesStayFiniteAndANanComesThrough) {
  for (const auto type : {kFloat, kBFloat16}) {
    for (const double gate : {0., 89., -89., 1e10, -1e10, -3e38}) {
      const auto x = at::full({2, 40}, gate, at::TensorOptions().dtype(type));
      const auto got = differentiate(entry(swiglu), {x, at::ones_like(x)}, {at::ones({2, 40})});
      EXPECT_TRUE(at::isfinite(got.outputs[0]).all().item<bool>()) << gate;
      for (const int i : {0, 1}) EXPECT_TRUE(at::isfinite(got.gradients[i]).all().item<bool>()) << kInputs[i] << gate;
    }
  }
  auto gate = at::ones({1, 40});
  gate[0][3] = std::nanf("");
  EXPECT_TRUE(at::isnan(swiglu(gate, at::ones({1, 40}))).nonzero().equal(at::tensor({0L, 3L}).view({1, 2})));
}

TEST(SwiGlu, RefusesWhatItCannotMean) {
  EXPECT_THAT(
      [] {
        swiglu(at::ones({3, 8}), at::ones({3, 7}));
      },
      ThrowsMessage<Error>(HasSubstr("gate and up must be [T, F] of one dtype; got gate [3, 8] Float")));
  EXPECT_THAT([] { swiglu(at::ones({3, 8}), at::ones({3, 8}, kF64)); }, ThrowsMessage<Error>(HasSubstr("one dtype")));
}

}  // namespace
}  // namespace sluice
