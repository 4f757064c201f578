// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/gated_delta_rule/cases.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr const char* kInputs[] = {"q", "k", "v", "g", "beta", "initial_state"};

struct Problem {
  std::vector<Tensor> inputs;   // q, k, v, g, beta, initial_state (float64)
  std::vector<Tensor> weights;  // of out and final_state in the loss
  Tensor cu_seqlens;
  double scale;
};

Problem draw(const GatedDeltaCase& c) {
  const auto tokens = std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0});
  const auto sequences = static_cast<std::int64_t>(c.lengths.size());
  const auto f64 = at::TensorOptions().dtype(kDouble);
  const auto state_shape = std::vector<std::int64_t>{sequences, c.value_heads, c.key_dim, c.value_dim};
  Problem p;
  p.inputs = {at::randn({tokens, c.key_heads, c.key_dim}, f64),
              at::randn({tokens, c.key_heads, c.key_dim}, f64),
              at::randn({tokens, c.value_heads, c.value_dim}, f64),
              at::rand({tokens, c.value_heads}, f64) * (c.strongest_decay - c.weakest_decay) + c.weakest_decay,
              at::rand({tokens, c.value_heads}, f64),
              c.initial_state ? at::randn(state_shape, f64) : Tensor()};
  p.weights = {at::randn(p.inputs[2].sizes(), f64), at::randn(state_shape, f64)};
  p.cu_seqlens = cu_seqlens_of(c.lengths);
  p.scale = 1 / std::sqrt(static_cast<double>(c.key_dim));
  return p;
}

Operator entry(const Problem& p, decltype(gated_delta_rule)& function, bool qk_l2norm) {
  return [&p, &function, qk_l2norm](const std::vector<Tensor>& x) {
    const auto state = x[5].defined() ? std::optional(x[5]) : std::nullopt;
    const auto result =
        function(x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, state, p.scale, qk_l2norm, /*output_final_state=*/true);
    return std::vector<Tensor>{result.out, result.final_state};
  };
}

// q, k, v in `type`, the rest as the operator takes them beside it; the definition sees the same rounded values.
std::vector<Tensor> rounded(const Problem& p, at::ScalarType type) {
  auto inputs = p.inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined()) inputs[i] = inputs[i].to(i < 3 ? type : type == kDouble ? kDouble : kFloat);
  }
  return inputs;
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound, double gradient_bound) {
  for (const bool qk_l2norm : {true, false}) {
    SCOPED_TRACE(qk_l2norm ? "normalised inside" : "taken as they are");
    auto inputs = rounded(p, type);
    if (!qk_l2norm) {  // the recurrence itself is stable only for keys of at most unit length
      for (const int i : {0, 1}) inputs[i] = (inputs[i] / inputs[i].norm(2, {-1}, true).clamp_min(1e-30)).to(type);
    }
    const auto got = differentiate(entry(p, gated_delta_rule, qk_l2norm), inputs, p.weights);
    const auto want =
        differentiate(entry(p, gated_delta_rule_definition, qk_l2norm), to_type(inputs, kDouble), p.weights);
    EXPECT_LT(relative_error(got.outputs[0], want.outputs[0]), bound);
    EXPECT_LT(relative_error(got.outputs[1], want.outputs[1]), bound);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined()) {
        EXPECT_LT(relative_error(got.gradients[i], want.gradients[i]), gradient_bound) << "gradient of " << kInputs[i];
      }
    }
  }
}

// In float64 both are exact but for rounding, 1e-16 a step, amplified by at most the condition of a chunk's solve; the
// gradient of a decay of e^-80 is itself of that size beside the others, hence a bound per tensor.
TEST(GatedDeltaRule, MatchesItsDefinitionInFloat64) {
  for (const auto& c : gated_delta_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    expect_equal_to_definition(draw(c), kDouble, 1e-9, 1e-9);
  }
}

// Float32 rounding is 6e-8; sums over up to 257 tokens and the solve cost two digits.
TEST(GatedDeltaRule, MatchesItsDefinitionInFloat32) {
  for (const auto& c : gated_delta_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, 1e-5, 1e-5);
  }
}

// The arithmetic is float32; the results, and the gradient that comes in, are rounded to bfloat16, 2^-9 relative each.
TEST(GatedDeltaRule, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : gated_delta_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, 4e-3, 8e-3);
  }
}

TEST(GatedDeltaRule, ComputesThePublishedVector) {
  const auto f64 = at::TensorOptions().dtype(kDouble);
  const auto q = at::tensor({1., 0., 0., 1., .6, .8}, f64).view({3, 1, 2});
  const auto k = at::tensor({1., 0., .6, .8, 0., 1.}, f64).view({3, 1, 2});
  const auto v = at::tensor({1., 2., 3., -1., .5, .5}, f64).view({3, 1, 2});
  const auto g = at::tensor({.5, .25, 1.}, f64).log().view({3, 1}), beta = at::tensor({1., .5, .25}, f64).view({3, 1});
  const auto result = gated_delta_rule(q, k, v, g, beta, cu_seqlens_of({3}), std::nullopt, 1 / std::sqrt(2.), false);
  const auto want = at::tensor({0.707107, 1.414214, 0.806102, -0.367696, 1.023184, -0.103238}, f64).view({3, 1, 2});
  EXPECT_LT((result.out - want).abs().max().item<double>(), 1e-6);
  EXPECT_LT((result.final_state.flatten() - at::tensor({1.105, 0.11, 0.98, -0.265}, f64)).abs().max().item<double>(),
            1e-9);
}

TEST(GatedDeltaRule, BetaZeroWritesNothingAndBetaOneReplaces) {
  at::manual_seed(4);
  auto p = draw({"beta", {90}, 1, 2, 16, 16, true});
  p.inputs[4] = at::bernoulli(at::full_like(p.inputs[4], 0.5));
  expect_equal_to_definition(p, kDouble, 1e-9, 1e-9);
}

// With one key repeated and no decay, (I + A) is as badly conditioned as it gets.
TEST(GatedDeltaRule, SurvivesRepeatedKeys) {
  at::manual_seed(5);
  auto p = draw({"repeated", {130}, 1, 2, 16, 16, true, 0, 0});
  p.inputs[1] = p.inputs[1].narrow(0, 0, 1).expand_as(p.inputs[1]).contiguous();
  expect_equal_to_definition(p, kDouble, 1e-9, 1e-9);
}

TEST(GatedDeltaRule, ZeroRowsOfQAndKAreHarmless) {
  at::manual_seed(6);
  auto p = draw({"zero rows", {70, 9}, 1, 2, 16, 16});
  for (const auto row : {3, 7, 75}) {
    p.inputs[0][row].zero_();
    p.inputs[1][row].zero_();
  }
  expect_equal_to_definition(p, kDouble, 1e-9, 1e-9);
  const auto got = differentiate(entry(p, gated_delta_rule, true), p.inputs, p.weights);
  EXPECT_EQ(got.outputs[0][3].abs().max().item<double>(), 0);
}

TEST(GatedDeltaRule, RecallsTheValueStoredUnderEachKey) {  // g = 0, beta = 1, orthonormal keys: q = k_i reads v_i
  const auto f64 = at::TensorOptions().dtype(kDouble);
  const auto keys = at::eye(32, f64).unsqueeze(1), values = at::randn({32, 1, 8}, f64);
  const auto stored = gated_delta_rule(keys, keys, values, at::zeros({32, 1}, f64), at::ones({32, 1}, f64),
                                       cu_seqlens_of({32}), std::nullopt, 1, false);
  const auto none = at::zeros({32, 1, 8}, f64);
  const auto read = gated_delta_rule(keys, keys, none, at::zeros({32, 1}, f64), at::zeros({32, 1}, f64),
                                     cu_seqlens_of({32}), stored.final_state, 1, false);
  EXPECT_LT(relative_error(read.out, values), 1e-12);
}

TEST(GatedDeltaRule, PackedSequencesEqualSeparateOnesBitForBit) {
  at::manual_seed(7);
  const std::vector<std::int64_t> lengths{1, 63, 64, 65, 5, 200};
  const auto p = draw({"pack", lengths, 2, 4, 16, 16, true});
  const auto inputs = rounded(p, kFloat);
  const auto packed = differentiate(entry(p, gated_delta_rule, true), inputs, p.weights);
  std::int64_t begin = 0;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    SCOPED_TRACE(lengths[n]);
    auto alone = p;
    alone.cu_seqlens = cu_seqlens_of({lengths[n]});
    std::vector<Tensor> own;
    const auto index = static_cast<std::int64_t>(n);
    for (const int i : {0, 1, 2, 3, 4}) own.push_back(inputs[i].narrow(0, begin, lengths[n]));
    own.push_back(inputs[5].narrow(0, index, 1));
    alone.weights = {p.weights[0].narrow(0, begin, lengths[n]), p.weights[1].narrow(0, index, 1)};
    const auto one = differentiate(entry(alone, gated_delta_rule, true), own, alone.weights);
    EXPECT_TRUE(one.outputs[0].equal(packed.outputs[0].narrow(0, begin, lengths[n])));
    EXPECT_TRUE(one.outputs[1].equal(packed.outputs[1].narrow(0, index, 1)));
    for (const int i : {0, 1, 2, 3, 4}) {
      EXPECT_TRUE(one.gradients[i].equal(packed.gradients[i].narrow(0, begin, lengths[n]))) << kInputs[i];
    }
    EXPECT_TRUE(one.gradients[5].equal(packed.gradients[5].narrow(0, index, 1)));
    begin += lengths[n];
  }
}

TEST(GatedDeltaRule, StateCarriesAcrossCalls) {
  at::manual_seed(8);
  const auto p = draw({"whole", {150}, 2, 4, 16, 16, true});
  const auto whole = entry(p, gated_delta_rule, true)(p.inputs);
  for (const std::int64_t split : {1, 64, 70, 149}) {
    const auto part = [&](std::int64_t begin, std::int64_t length, const Tensor& state) {
      std::vector<Tensor> inputs;
      for (const int i : {0, 1, 2, 3, 4}) inputs.push_back(p.inputs[i].narrow(0, begin, length));
      return gated_delta_rule(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], cu_seqlens_of({length}), state,
                              p.scale, true);
    };
    const auto first = part(0, split, p.inputs[5]);
    const auto second = part(split, 150 - split, first.final_state);
    EXPECT_LT(relative_error(at::cat({first.out, second.out}), whole[0]), 1e-12);
    EXPECT_LT(relative_error(second.final_state, whole[1]), 1e-12);
  }
}

TEST(GatedDeltaRule, FinalStatesAreLeftOutWhereNobodyWantsThem) {
  at::manual_seed(10);
  const auto p = draw({"two", {70, 3}, 1, 2, 8, 8, true});
  const auto run = [&](bool output_final_state) {
    std::vector<Tensor> leaves;
    for (const auto& input : p.inputs) leaves.push_back(input.detach().clone().requires_grad_());
    const auto result = gated_delta_rule(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], p.cu_seqlens, leaves[5],
                                         p.scale, true, output_final_state);
    EXPECT_EQ(result.final_state.size(0), output_final_state ? 2 : 0);
    (result.out * p.weights[0]).sum().backward();
    leaves.push_back(result.out.detach());
    return leaves;
  };
  const auto with = run(true), without = run(false);
  EXPECT_TRUE(with.back().equal(without.back()));
  for (const int i : {0, 1, 2, 3, 4, 5}) EXPECT_TRUE(with[i].grad().equal(without[i].grad()));
}

TEST(GatedDeltaRule, GradientsMayTakeThePlacesOfTheirInputs) {
  at::manual_seed(11);
  const auto p = draw({"joint", {70, 3}, 1, 2, 8, 8, false});
  const auto want = differentiate(entry(p, gated_delta_rule, true), p.inputs, p.weights);
  auto q = p.inputs[0].clone(), k = p.inputs[1].clone(), v = p.inputs[2].clone();
  const auto& g = p.inputs[3];
  const auto& beta = p.inputs[4];
  const auto checkpoints =
      gated_delta_rule(q, k, v, g, beta, p.cu_seqlens, std::nullopt, p.scale, true, false).checkpoints;
  const auto got = gated_delta_rule_backward(p.weights[0], p.weights[1], q, k, v, g, beta, p.cu_seqlens, std::nullopt,
                                             checkpoints, p.scale, true, q, k, v);
  const std::vector<Tensor> found{q, k, v, got.g, got.beta};
  for (const int i : {0, 1, 2, 3, 4}) EXPECT_TRUE(found[i].equal(want.gradients[i]));
}

// In steps the rule gives the bits that it gives at once, forward and backward, for every state and its gradient.
TEST(GatedDeltaRule, StepsEqualTheWholeBitForBit) {
  at::manual_seed(12);
  const auto p = draw({"steps", {70, 3}, 1, 2, 8, 8, true});
  const auto& x = p.inputs;
  const auto prepared = gated_delta_rule_prepare(x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, p.scale, true);
  for (const auto& state : {std::optional(x[5]), std::optional<Tensor>()}) {
    const auto whole = gated_delta_rule(x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, state, p.scale, true);
    const auto stepped =
        gated_delta_rule_prepared(prepared, x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, state, p.scale, true, true);
    EXPECT_TRUE(stepped.out.equal(whole.out) && stepped.final_state.equal(whole.final_state));
    for (const auto& grad_final_state : {std::optional(p.weights[1]), std::optional<Tensor>()}) {
      auto dq = at::empty_like(x[0]), dk = at::empty_like(x[1]), dv = at::empty_like(x[2]);
      const auto want = gated_delta_rule_backward(p.weights[0], grad_final_state, x[0], x[1], x[2], x[3], x[4],
                                                  p.cu_seqlens, state, whole.checkpoints, p.scale, true, dq, dk, dv);
      for (const bool from_zero : {true, false}) {
        auto q = x[0].clone(), k = x[1].clone(), v = x[2].clone();
        GatedDeltaBackward backward(p.weights[0], q, k, v, x[3], x[4], p.cu_seqlens, state, p.scale, true, from_zero);
        if (from_zero && !grad_final_state) {
          EXPECT_TRUE(backward.grad_initial_state().equal(want.initial_state));
        }
        const auto [dg, dbeta] = backward.finish(grad_final_state, q, k, v);
        EXPECT_TRUE(q.equal(dq) && k.equal(dk) && v.equal(dv) && dg.equal(want.g) && dbeta.equal(want.beta));
      }
    }
  }
}

TEST(GatedDeltaRule, ValueHeadsUseTheirOwnKeyHead) {
  for (const std::int64_t group : {1, 2, 3}) {
    at::manual_seed(9);
    auto p = draw({"groups", {40}, 2, 2 * group, 8, 8});
    const auto before = entry(p, gated_delta_rule, true)(p.inputs)[0];
    p.inputs[0].select(1, 1).zero_();
    p.inputs[1].select(1, 1).zero_();
    const auto after = entry(p, gated_delta_rule, true)(p.inputs)[0];
    EXPECT_TRUE(after.narrow(1, 0, group).equal(before.narrow(1, 0, group)));
    EXPECT_EQ(after.narrow(1, group, group).abs().max().item<double>(), 0);
  }
}

TEST(GatedDeltaRule, RefusesWhatItCannotMean) {
  const auto p = draw({"errors", {8}, 2, 4, 8, 8});
  const auto& x = p.inputs;
  const auto expect_error = [](const std::string& part, const auto& call) {
    try {
      call();
      FAIL() << "expected an error with: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect_error("g and beta must be float64 [T=8, Hv=4]", [&] {
    gated_delta_rule(x[0], x[1], x[2], x[3].narrow(1, 0, 2), x[4], p.cu_seqlens, std::nullopt, 1, true);
  });
  expect_error("end with the number of tokens, 8",
               [&] { gated_delta_rule(x[0], x[1], x[2], x[3], x[4], cu_seqlens_of({7}), std::nullopt, 1, true); });
  expect_error("Hv a multiple of Hk", [&] {
    gated_delta_rule(x[0], x[1], x[2].narrow(1, 0, 3), x[3], x[4], p.cu_seqlens, std::nullopt, 1, true);
  });
}

// What the first step of the backward pass kept comes back through the dispatcher, so it may be anything.
TEST(GatedDeltaRule, RefusesToFinishWhatItDidNotBegin) {
  using Begin = std::tuple<Tensor, std::vector<Tensor>>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                        const Tensor&, const Tensor&, const Tensor&,
                                                        const std::optional<Tensor>&, double, bool, bool);
  using Finish = std::tuple<Tensor, Tensor>(at::TensorList, const std::optional<Tensor>&, const Tensor&, const Tensor&,
                                            const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const std::optional<Tensor>&, double, bool, Tensor&, Tensor&, Tensor&);
  const auto p = draw({"errors", {8}, 2, 4, 8, 8});
  const auto& x = p.inputs;
  const auto& grad_out = p.weights[0];
  const auto good = std::get<1>(
      registered_operator<Begin>("sluice::gated_delta_rule_backward", "begin")
          .call(grad_out, x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, std::nullopt, p.scale, true, /*from_zero=*/true));
  const auto message_of = [&](const std::vector<Tensor>& kept) -> std::string {
    auto dq = at::empty_like(x[0]), dk = at::empty_like(x[1]), dv = at::empty_like(x[2]);
    try {
      registered_operator<Finish>("sluice::gated_delta_rule_backward", "finish")
          .call(kept, std::nullopt, grad_out, x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, std::nullopt, p.scale, true,
                dq, dk, dv);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message_of(good), "");
  EXPECT_THAT(message_of({good[0]}), HasSubstr("no tensor or 5; got 1"));
  auto kept = good;
  kept[0] = good[0].to(kFloat);
  EXPECT_THAT(message_of(kept), HasSubstr("kept[0] must be the gradient of q, [8, 2, 8] Double; got [8, 2, 8] Float"));
  kept = good;
  kept[4] = good[4][0];  // would be spread over all tokens
  EXPECT_THAT(message_of(kept), HasSubstr("kept[4] must be the gradient of beta, [8, 4] Double; got [4] Double"));
}

// What begins in the slots' states and is left there is what comes and goes by argument otherwise, bit for bit; other
// slots keep theirs.
TEST(GatedDeltaRule, ContinuesTheStatesOfItsSlots) {
  const std::vector<std::vector<std::int64_t>> packs{{1, 1, 1}, {3, 0, 8}, {70, 1, 5}};
  for (const auto& lengths : packs) {
    SCOPED_TRACE(lengths[0]);
    at::manual_seed(11);
    const auto p = draw({.name = "",
                         .lengths = lengths,
                         .key_heads = 2,
                         .value_heads = 4,
                         .key_dim = 8,
                         .value_dim = 16,
                         .initial_state = true});
    const auto x = rounded(p, kFloat);
    for (const auto& slots : {std::vector<std::int64_t>{0, 1, 2}, {1, 2, 4}}) {
      const auto place = at::tensor(slots);
      const auto before = at::randn({slots.back() + 1, 4, 8, 16});
      auto states = before.clone();
      const auto out = gated_delta_rule_cached(x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, place, states,
                                               std::ranges::max(lengths), p.scale, /*qk_l2norm=*/true);
      const auto want = gated_delta_rule(x[0], x[1], x[2], x[3], x[4], p.cu_seqlens, before.index_select(0, place),
                                         p.scale, /*qk_l2norm=*/true);
      EXPECT_TRUE(out.equal(want.out));
      EXPECT_TRUE(states.equal(before.index_copy(0, place, want.final_state)));
    }
  }
}

}  // namespace
}  // namespace sluice
