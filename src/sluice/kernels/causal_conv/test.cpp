// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/causal_conv/cases.h"
#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/common/testing.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"x", "weight", "initial_state"};
const auto kF64 = at::TensorOptions().dtype(kDouble);

struct Problem {
  std::vector<Tensor> inputs;   // x, weight, initial_state (float64)
  std::vector<Tensor> weights;  // of out and final_state in the loss, exact in bfloat16
  Tensor cu_seqlens;
};

Problem draw(const CausalConvCase& c) {
  const auto tokens = std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0});
  const std::vector<std::int64_t> state_shape{static_cast<std::int64_t>(c.lengths.size()), c.channels, c.width - 1};
  return {.inputs = {at::randn({tokens, c.channels}, kF64), at::randn({c.channels, 1, c.width}, kF64),
                     c.initial_state ? at::randn(state_shape, kF64) : Tensor()},
          .weights = {at::randn({tokens, c.channels}, kF64).to(kBFloat16).to(kDouble),
                      at::randn(state_shape, kF64).to(kBFloat16).to(kDouble)},
          .cu_seqlens = cu_seqlens_of(c.lengths)};
}

Operator entry(const Tensor& cu_seqlens, decltype(causal_conv)& function, bool silu = true) {
  return [cu_seqlens, &function, silu](const std::vector<Tensor>& x) {
    const auto result = function(x[0], x[1], cu_seqlens, x[2].defined() ? std::optional(x[2]) : std::nullopt, silu);
    return std::vector<Tensor>{result.out, result.final_state};
  };
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound) {
  for (const bool silu : {true, false}) {
    SCOPED_TRACE(silu ? "silu" : "no activation");
    const auto inputs = to_type(p.inputs, type);
    const auto got = differentiate(entry(p.cu_seqlens, causal_conv, silu), inputs, p.weights);
    const auto want =
        differentiate(entry(p.cu_seqlens, causal_conv_definition, silu), to_type(inputs, kDouble), p.weights);
    EXPECT_LE(relative_error(got.outputs[0], want.outputs[0]), bound);
    EXPECT_EQ(relative_error(got.outputs[1], want.outputs[1]), 0) << "a state is a copy";
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined()) {
        EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), bound) << "gradient of " << kInputs[i];
      }
    }
  }
}

TEST(CausalConv, MatchesItsDefinitionInFloat64) {
  for (const auto& c : causal_conv_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    expect_equal_to_definition(draw(c), kDouble, 1e-12);
  }
}

// Sums of at most 7 products and an exponential: a few 1e-7; the weight's gradient adds about 900 rows in float32.
TEST(CausalConv, MatchesItsDefinitionInFloat32) {
  for (const auto& c : causal_conv_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, 2e-6);
  }
}

// One rounding of each result to bfloat16, at most 2^-8 = 3.9e-3 relative, in the norm too.
TEST(CausalConv, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : causal_conv_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, 3.91e-3);
  }
}

TEST(CausalConv, LastTapMeetsTheTokenItself) {
  const auto weight = at::tensor({1000., 100., 10., 1.}, kF64).view({1, 1, 4});
  const auto x = at::tensor({1., 2., 3., 4., 5.}, kF64).view({5, 1});
  const auto state = at::tensor({7., 8., 9.}, kF64).view({1, 1, 3});
  const auto [out, final_state] = causal_conv(x, weight, cu_seqlens_of({5}), state, false);
  EXPECT_TRUE(out.flatten().equal(at::tensor({7891., 8912., 9123., 1234., 2345.}, kF64)));
  EXPECT_TRUE(final_state.flatten().equal(at::tensor({3., 4., 5.}, kF64)));
}

TEST(CausalConv, ShortSequencesKeepTheTailOfTheirState) {
  const auto weight = at::ones({1, 1, 4}, kF64);
  const auto state = at::tensor({7., 8., 9.}, kF64).view({1, 1, 3}).expand({3, 1, 3});
  const auto x = at::tensor({1., 2., 3.}, kF64).view({3, 1});
  const auto final_state = causal_conv(x, weight, cu_seqlens_of({0, 1, 2}), state, true).final_state;
  EXPECT_TRUE(final_state.flatten().equal(at::tensor({7., 8., 9., 8., 9., 1., 9., 2., 3.}, kF64)));
}

// The pieces of a sequence, each with the state that the last one left, give what the whole gives, and gradients too.
TEST(CausalConv, StateCarriesAcrossCalls) {
  at::manual_seed(4);
  const auto p = draw({"whole", {150}, 24, 4, true});
  const auto whole = differentiate(entry(p.cu_seqlens, causal_conv), p.inputs, p.weights);
  for (const std::int64_t split : {1, 2, 3, 70, 149}) {
    SCOPED_TRACE(split);
    const auto halves = [split](const std::vector<Tensor>& x) {
      const auto first = causal_conv(x[0].narrow(0, 0, split), x[1], cu_seqlens_of({split}), x[2], true);
      const auto second =
          causal_conv(x[0].narrow(0, split, 150 - split), x[1], cu_seqlens_of({150 - split}), first.final_state, true);
      return std::vector<Tensor>{at::cat({first.out, second.out}), second.final_state};
    };
    const auto parts = differentiate(halves, p.inputs, p.weights);
    for (const int i : {0, 1}) EXPECT_TRUE(parts.outputs[i].equal(whole.outputs[i]));
    for (const int i : {0, 1, 2}) EXPECT_LT(relative_error(parts.gradients[i], whole.gradients[i]), 1e-12);
  }
}

TEST(CausalConv, PackedSequencesEqualSeparateOnesBitForBit) {
  at::manual_seed(5);
  const std::vector<std::int64_t> lengths{1, 63, 2, 64, 65, 3, 200};
  const auto p = draw({"pack", lengths, 70, 4, true});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto packed = differentiate(entry(p.cu_seqlens, causal_conv), inputs, p.weights);
  auto weight_gradient = at::zeros_like(packed.gradients[1]);
  std::int64_t begin = 0;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    SCOPED_TRACE(lengths[n]);
    const auto tokens = [&](const Tensor& x) { return x.narrow(0, begin, lengths[n]); };
    const auto state = [&](const Tensor& x) { return x.narrow(0, static_cast<std::int64_t>(n), 1); };
    const auto one =
        differentiate(entry(cu_seqlens_of({lengths[n]}), causal_conv), {tokens(inputs[0]), inputs[1], state(inputs[2])},
                      {tokens(p.weights[0]), state(p.weights[1])});
    EXPECT_TRUE(one.outputs[0].equal(tokens(packed.outputs[0])));
    EXPECT_TRUE(one.outputs[1].equal(state(packed.outputs[1])));
    EXPECT_TRUE(one.gradients[0].equal(tokens(packed.gradients[0])));
    EXPECT_TRUE(one.gradients[2].equal(state(packed.gradients[2])));
    weight_gradient += one.gradients[1];
    begin += lengths[n];
  }
  EXPECT_LT(relative_error(weight_gradient, packed.gradients[1]), 1e-6);  // a sum in another order
}

TEST(CausalConv, TakesALossOnTheFinalStateAlone) {
  at::manual_seed(6);
  for (const std::int64_t length : {1, 2, 3, 9}) {
    SCOPED_TRACE(length);
    auto p = draw({"state", {length}, 64, 4, true});
    p.weights[0] = Tensor();
    const auto got = differentiate(entry(p.cu_seqlens, causal_conv), p.inputs, p.weights);
    const auto want = differentiate(entry(p.cu_seqlens, causal_conv_definition), p.inputs, p.weights);
    EXPECT_TRUE(got.gradients[0].equal(want.gradients[0]));
    EXPECT_TRUE(got.gradients[2].equal(want.gradients[2]));
  }
}

TEST(CausalConv, TakesAnyStrides) {
  at::manual_seed(7);
  const auto p = draw({"strides", {13, 20}, 48, 4, true});
  for (const auto& view : {at::randn({33, 100}, kF64).narrow(1, 7, 48), at::randn({48, 33}, kF64).t(),
                           at::randn({33, 96}, kF64).slice(1, 0, 96, 2)}) {
    const auto got = entry(p.cu_seqlens, causal_conv)({view, p.inputs[1], p.inputs[2]});
    const auto want = entry(p.cu_seqlens, causal_conv)({view.contiguous(), p.inputs[1], p.inputs[2]});
    for (const int i : {0, 1}) EXPECT_TRUE(got[i].equal(want[i]));
  }
}

TEST(CausalConv, GradientBitsDoNotDependOnThreads) {
  at::manual_seed(8);
  const auto p = draw({"threads", {300, 1000}, 300, 4, true});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto threads = at::get_num_threads();
  const auto many = differentiate(entry(p.cu_seqlens, causal_conv), inputs, p.weights);
  at::set_num_threads(1);
  const auto one = differentiate(entry(p.cu_seqlens, causal_conv), inputs, p.weights);
  at::set_num_threads(threads);
  for (const int i : {0, 1, 2}) EXPECT_TRUE(one.gradients[i].equal(many.gradients[i])) << kInputs[i];
}

TEST(CausalConv, ZeroAndExtremeValuesStayFinite) {
  for (const double value : {0., 1e-38, 1e30, -1e30}) {
    SCOPED_TRACE(value);
    const auto got = differentiate(entry(cu_seqlens_of({5}), causal_conv),
                                   {at::full({5, 20}, value), at::ones({20, 1, 4}), Tensor()}, {at::ones({5, 20})});
    EXPECT_TRUE(at::isfinite(got.outputs[0]).all().item<bool>());
    for (const int i : {0, 1}) EXPECT_TRUE(at::isfinite(got.gradients[i]).all().item<bool>()) << kInputs[i];
  }
}

TEST(CausalConv, RefusesWhatItCannotMean) {
  const auto x = at::ones({8, 6}), weight = at::ones({6, 1, 4}), bounds = cu_seqlens_of({8});
  EXPECT_THAT(
      [&] {
        causal_conv(x, at::ones({6, 4}), bounds, std::nullopt, true);
      },
      ThrowsMessage<Error>(HasSubstr("weight [C, 1, W] with W >= 1; got x [8, 6] Float, weight [6, 4] Float")));
  EXPECT_THAT([&] { causal_conv(x, weight, cu_seqlens_of({7}), std::nullopt, true); },
              ThrowsMessage<Error>(HasSubstr("end with the number of tokens, 8")));
  EXPECT_THAT(
      [&] {
        causal_conv(x, weight, bounds, at::ones({1, 6, 4}), true);
      },
      ThrowsMessage<Error>(HasSubstr("initial_state must be [N=1, C=6, W-1=3] in the dtype of x")));
  EXPECT_THAT([&] { causal_conv(x, weight.to(kBFloat16), bounds, std::nullopt, true); },
              ThrowsMessage<Error>(HasSubstr("weight must have the dtype of x or float32")));
}

// As by argument, bit for bit; other slots keep theirs.
TEST(CausalConv, ContinuesTheStatesOfItsSlots) {
  const std::vector<std::vector<std::int64_t>> packs{{1, 1, 1}, {3, 0, 8}, {70, 1, 5}};
  for (const auto& lengths : packs) {
    SCOPED_TRACE(lengths[0]);
    at::manual_seed(12);
    const auto p = draw({.name = "", .lengths = lengths, .channels = 33, .width = 4});
    const auto inputs = to_type(p.inputs, kFloat);
    const auto place = at::tensor(std::vector<std::int64_t>{1, 2, 4});
    const auto before = at::randn({6, 33, 3});
    auto states = before.clone();
    const auto out = causal_conv_cached(inputs[0], inputs[1], p.cu_seqlens, place, states, std::ranges::max(lengths),
                                        /*silu=*/true);
    const auto want = causal_conv(inputs[0], inputs[1], p.cu_seqlens, before.index_select(0, place), /*silu=*/true);
    EXPECT_TRUE(out.equal(want.out));
    EXPECT_TRUE(states.equal(before.index_copy(0, place, want.final_state)));
  }
}

}  // namespace
}  // namespace sluice
