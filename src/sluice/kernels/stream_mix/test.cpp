// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/stream_mix/cases.h"
#include "sluice/kernels/stream_mix/stream_mix.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"x", "gate"};
const auto kF64 = at::TensorOptions().dtype(kDouble);

Operator entry(decltype(stream_mix)& function) {
  return [&function](const std::vector<Tensor>& x) { return std::vector<Tensor>{function(x[0], x[1])}; };
}

void expect_equal_to_definition(const StreamMixCase& c, at::ScalarType type, double bound) {
  SCOPED_TRACE(c.name);
  const std::vector<std::int64_t> shape{c.tokens, c.streams, c.width};
  const auto inputs = to_type({at::randn(shape, kF64), at::randn(shape, kF64) * c.scale}, type);
  const std::vector<Tensor> weights{at::randn({c.tokens, c.width}, kF64).to(kBFloat16)};
  const auto got = differentiate(entry(stream_mix), inputs, weights);
  const auto want = differentiate(entry(stream_mix_definition), to_type(inputs, kDouble), weights);
  EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
  for (const int i : {0, 1}) {
    EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), bound) << "gradient of " << kInputs[i];
  }
}

TEST(StreamMix, MatchesItsDefinitionInFloat64) {
  at::manual_seed(1);
  for (const auto& c : stream_mix_cases()) expect_equal_to_definition(c, kDouble, 1e-13);
}

// An exponential within 2e-7 and a few roundings of 6e-8, of up to nine terms.
TEST(StreamMix, MatchesItsDefinitionInFloat32) {
  at::manual_seed(2);
  for (const auto& c : stream_mix_cases()) expect_equal_to_definition(c, kFloat, 1e-6);
}

// One rounding of each result to bfloat16, at most 2^-8 = 3.906e-3 relative, in the norm too.
TEST(StreamMix, MatchesItsDefinitionInBfloat16) {
  at::manual_seed(3);
  for (const auto& c : stream_mix_cases()) expect_equal_to_definition(c, kBFloat16, 3.91e-3);
}

TEST(StreamMix, OpenGatesGiveTheMeanAndClosedOnesNothing) {
  at::manual_seed(4);
  const auto x = at::randn({5, 4, 16}, kF64);
  EXPECT_LT(relative_error(stream_mix(x, at::full_like(x, 50)), x.mean(1)), 1e-14);
  EXPECT_LT(stream_mix(x, at::full_like(x, -800)).abs().max().item<double>(), 1e-300);
}

TEST(StreamMix, TakesAnyStrides) {
  at::manual_seed(5);
  const auto wide = at::randn({30, 4, 65}), x = wide.narrow(2, 1, 64), gate = at::randn({4, 30, 64}).transpose(0, 1);
  EXPECT_TRUE(stream_mix(x, gate).equal(stream_mix(x.contiguous(), gate.contiguous())));
}

TEST(StreamMix, PackedTokensEqualSeparateOnesBitForBit) {
  at::manual_seed(6);
  const auto x = at::randn({50, 4, 257}), gate = at::randn({50, 4, 257});
  const auto all = stream_mix(x, gate);
  for (const std::int64_t token : {0, 17, 49}) {
    EXPECT_TRUE(stream_mix(x.narrow(0, token, 1), gate.narrow(0, token, 1)).equal(all.narrow(0, token, 1)));
  }
}

TEST(StreamMix, NoTokensGiveNoTokens) {
  const auto got = differentiate(entry(stream_mix), {at::ones({0, 4, 8}), at::ones({0, 4, 8})}, {at::ones({0, 8})});
  EXPECT_EQ(got.outputs[0].sizes(), (std::vector<std::int64_t>{0, 8}));
  EXPECT_EQ(got.gradients[1].sizes(), (std::vector<std::int64_t>{0, 4, 8}));
}

TEST(StreamMix, RefusesWhatItCannotMean) {
  EXPECT_THAT(
      [] {
        stream_mix(at::ones({3, 4, 8}), at::ones({3, 4, 7}));
      },
      ThrowsMessage<Error>(
          HasSubstr("x and gate must be [T, n, D] of one dtype, with a stream at least; got x [3, 4, 8]")));
  EXPECT_THAT(
      [] {
        stream_mix(at::ones({3, 0, 8}), at::ones({3, 0, 8}));
      },
      ThrowsMessage<Error>(HasSubstr("with a stream at least")));
  EXPECT_THAT(
      [] {
        stream_mix(at::ones({3, 4, 8}), at::ones({3, 4, 8}, kF64));
      },
      ThrowsMessage<Error>(HasSubstr("one dtype")));
}

}  // namespace
}  // namespace sluice
