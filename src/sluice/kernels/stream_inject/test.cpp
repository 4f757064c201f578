// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/stream_inject/cases.h"
#include "sluice/kernels/stream_inject/stream_inject.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"residual", "y", "gate"};
const auto kF64 = at::TensorOptions().dtype(kDouble);

Operator entry(decltype(stream_inject)& function) {
  return [&function](const std::vector<Tensor>& x) { return std::vector<Tensor>{function(x[0], x[1], x[2])}; };
}

void expect_equal_to_definition(const StreamInjectCase& c, at::ScalarType type, double bound) {
  SCOPED_TRACE(c.name);
  const std::vector<std::int64_t> shape{c.tokens, c.streams, c.width};
  const auto inputs = to_type(
      {at::randn(shape, kF64), at::randn({c.tokens, c.width}, kF64), at::randn({c.tokens, c.streams}, kF64) * c.scale},
      type);
  const std::vector<Tensor> weights{at::randn(shape, kF64).to(kBFloat16)};
  const auto got = differentiate(entry(stream_inject), inputs, weights);
  const auto want = differentiate(entry(stream_inject_definition), to_type(inputs, kDouble), weights);
  EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
  for (const int i : {0, 1, 2}) {
    EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), bound) << "gradient of " << kInputs[i];
  }
}

TEST(StreamInject, MatchesItsDefinitionInFloat64) {
  at::manual_seed(1);
  for (const auto& c : stream_inject_cases()) expect_equal_to_definition(c, kDouble, 1e-13);
}

// An exponential within 2e-7 and roundings of 6e-8; the gate's gradient is a sum over features that partly cancels.
TEST(StreamInject, MatchesItsDefinitionInFloat32) {
  at::manual_seed(2);
  for (const auto& c : stream_inject_cases()) expect_equal_to_definition(c, kFloat, 2e-6);
}

// One rounding of each result to bfloat16, at most 2^-8 = 3.906e-3 relative, in the norm too.
TEST(StreamInject, MatchesItsDefinitionInBfloat16) {
  at::manual_seed(3);
  for (const auto& c : stream_inject_cases()) expect_equal_to_definition(c, kBFloat16, 3.91e-3);
}

TEST(StreamInject, AGateOfZeroAddsAndAClosedOneLeavesTheStream) {
  at::manual_seed(4);
  const auto residual = at::randn({5, 4, 16}, kF64), y = at::randn({5, 16}, kF64);
  EXPECT_TRUE(stream_inject(residual, y, at::zeros({5, 4}, kF64)).equal(residual + y.unsqueeze(1)));
  EXPECT_TRUE(stream_inject(residual, y, at::full({5, 4}, -800, kF64)).equal(residual));
}

TEST(StreamInject, TakesAnyStrides) {
  at::manual_seed(5);
  const auto residual = at::randn({30, 4, 65}).narrow(2, 1, 64), y = at::randn({64, 30}).t();
  const auto gate = at::randn({30, 8}).slice(1, 0, 8, 2);
  EXPECT_TRUE(
      stream_inject(residual, y, gate).equal(stream_inject(residual.contiguous(), y.contiguous(), gate.contiguous())));
}

TEST(StreamInject, PackedTokensEqualSeparateOnesBitForBit) {
  at::manual_seed(6);
  const auto residual = at::randn({50, 4, 257}), y = at::randn({50, 257}), gate = at::randn({50, 4});
  const auto weight = at::randn({50, 4, 257}, kF64);
  const auto all = differentiate(entry(stream_inject), {residual, y, gate}, {weight});
  for (const std::int64_t token : {0, 17, 49}) {
    const auto of = [token](const Tensor& x) { return x.narrow(0, token, 1); };
    const auto one = differentiate(entry(stream_inject), {of(residual), of(y), of(gate)}, {of(weight)});
    EXPECT_TRUE(one.outputs[0].equal(of(all.outputs[0])));
    for (const int i : {0, 1, 2}) EXPECT_TRUE(one.gradients[i].equal(of(all.gradients[i]))) << kInputs[i];
  }
}

TEST(StreamInject, NoTokensGiveNoTokens) {
  const auto got = differentiate(entry(stream_inject), {at::ones({0, 4, 8}), at::ones({0, 8}), at::ones({0, 4})},
                                 {at::ones({0, 4, 8})});
  EXPECT_EQ(got.outputs[0].sizes(), (std::vector<std::int64_t>{0, 4, 8}));
  EXPECT_EQ(got.gradients[2].sizes(), (std::vector<std::int64_t>{0, 4}));
}

TEST(StreamInject, RefusesWhatItCannotMean) {
  const auto residual = at::ones({3, 4, 8}), y = at::ones({3, 8}), gate = at::ones({3, 4});
  EXPECT_THAT(
      [&] { stream_inject(residual, gate, y); },
      ThrowsMessage<Error>(HasSubstr("residual must be [T, n, D], y [T, D] and gate [T, n], of one dtype; got")));
  EXPECT_THAT([&] { stream_inject(residual, y, gate.to(kDouble)); }, ThrowsMessage<Error>(HasSubstr("of one dtype")));
}

}  // namespace
}  // namespace sluice
