// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/attention/cases.h"
#include "sluice/kernels/common/testing.h"

namespace sluice {
namespace {

constexpr const char* kInputs[] = {"q", "k", "v"};

struct Problem {
  std::vector<Tensor> inputs;   // q, k, v (float64)
  std::vector<Tensor> weights;  // of the output in the loss
  Tensor cu_seqlens_q, cu_seqlens_k;
  std::optional<Tensor> seqused_k;
  double scale;
};

Problem draw(const AttentionCase& c) {
  const auto sum = [](const auto& lengths) { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); };
  const auto queries = sum(c.queries);
  const auto slabs = std::vector<std::int64_t>(c.keys.size(), c.capacity);
  const auto keys = sum(c.capacity > 0 ? slabs : c.keys);
  const auto f64 = at::TensorOptions().dtype(kDouble);
  Problem p;
  p.inputs = {at::randn({queries, c.heads, c.key_dim}, f64), at::randn({keys, c.kv_heads, c.key_dim}, f64),
              at::randn({keys, c.kv_heads, c.value_dim}, f64)};
  p.weights = {at::randn({queries, c.heads, c.value_dim}, f64)};
  p.cu_seqlens_q = cu_seqlens_of(c.queries);
  p.cu_seqlens_k = cu_seqlens_of(c.capacity > 0 ? slabs : c.keys);
  if (c.capacity > 0) p.seqused_k = at::tensor(c.keys, at::TensorOptions().dtype(kInt));
  p.scale = 1 / std::sqrt(static_cast<double>(c.key_dim));
  return p;
}

// The entry with the longest lengths filled in: arguments as the definition's.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
              const std::optional<Tensor>& seqused_k, double scale) {
  const auto longest = [](const Tensor& lengths) { return lengths.max().item<std::int64_t>(); };
  return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, longest(cu_seqlens_q.diff()),
                   longest(seqused_k ? *seqused_k : cu_seqlens_k.diff()), scale);
}

Operator entry(const Problem& p, decltype(attend)& function) {
  return [&p, &function](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{function(x[0], x[1], x[2], p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_k, p.scale)};
  };
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound, double gradient_bound) {
  const auto inputs = to_type(p.inputs, type);
  const auto got = differentiate(entry(p, attend), inputs, p.weights);
  const auto want = differentiate(entry(p, attention_definition), to_type(inputs, kDouble), p.weights);
  EXPECT_EQ(got.outputs[0].scalar_type(), type);
  EXPECT_LT(relative_error(got.outputs[0], want.outputs[0]), bound);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], want.gradients[i]), gradient_bound) << "gradient of " << kInputs[i];
  }
}

// Sums of at most 2,500 terms, rounded to 1e-16 each.
TEST(Attention, MatchesItsDefinitionInFloat64) {
  for (const auto& c : attention_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    expect_equal_to_definition(draw(c), kDouble, 1e-12, 1e-12);
  }
}

// A score of size 5 is rounded to 3e-7, which is the relative error of its probability; exp adds 2e-7. Gradients of
// scores are differences of numbers ten times as large.
TEST(Attention, MatchesItsDefinitionInFloat32) {
  for (const auto& c : attention_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, 2e-6, 2e-5);
  }
}

// Scores and sums are float32. Probabilities are rounded for the product with v, and the result again: at most
// 2^-9 = 2e-3 each. For gradients, dO, P and dS are rounded and D = dO . O takes the rounded output.
TEST(Attention, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : attention_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, 5e-3, 1e-2);
  }
}

TEST(Attention, PackedSequencesEqualSeparateOnesBitForBit) {
  const std::vector<std::int64_t> lengths{1, 63, 2, 300, 0, 5, 257};
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(4);
    const auto p = draw({"pack", lengths, lengths, 4, 2, 16, 16});
    const auto inputs = to_type(p.inputs, type);
    const auto packed = differentiate(entry(p, attend), inputs, p.weights);
    std::int64_t begin = 0;
    for (const auto length : lengths) {
      SCOPED_TRACE(fmt::format("{} {}", c10::toString(type), length));
      auto alone = p;
      alone.cu_seqlens_q = alone.cu_seqlens_k = cu_seqlens_of({length});
      const auto part = [&](const Tensor& x) { return x.narrow(0, begin, length); };
      const auto one = differentiate(entry(alone, attend), {part(inputs[0]), part(inputs[1]), part(inputs[2])},
                                     {part(p.weights[0])});
      EXPECT_TRUE(one.outputs[0].equal(part(packed.outputs[0])));
      for (const int i : {0, 1, 2}) EXPECT_TRUE(one.gradients[i].equal(part(packed.gradients[i]))) << kInputs[i];
      begin += length;
    }
  }
}

TEST(Attention, TheSameInputsGiveTheSameBits) {
  at::manual_seed(5);
  const auto p = draw({"twice", {700, 30}, {700, 30}, 4, 1, 16, 16});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto first = differentiate(entry(p, attend), inputs, p.weights),
             second = differentiate(entry(p, attend), inputs, p.weights);
  EXPECT_TRUE(first.outputs[0].equal(second.outputs[0]));
  for (const int i : {0, 1, 2}) EXPECT_TRUE(first.gradients[i].equal(second.gradients[i])) << kInputs[i];
}

TEST(Attention, AQueryNeverSeesWhatFollowsIt) {
  at::manual_seed(6);
  auto p = draw({"causal", {290, 8}, {290, 40}, 4, 2, 16, 16, 300});
  const auto before = entry(p, attend)(p.inputs)[0];
  for (const std::int64_t t : {0, 17, 255, 256, 288}) {
    SCOPED_TRACE(t);
    auto changed = p.inputs;
    for (const int i : {1, 2}) {
      changed[i] = changed[i].clone();
      changed[i].narrow(0, t + 1, 289 - t).mul_(-3);
    }
    const auto after = entry(p, attend)(changed)[0];
    EXPECT_TRUE(after.narrow(0, 0, t + 1).equal(before.narrow(0, 0, t + 1)));
    EXPECT_FALSE(after[t + 1].equal(before[t + 1]));
  }
}

// Rows of a slab that hold no key may hold anything, and get no gradient.
TEST(Attention, UnusedRowsOfTheCacheCountForNothing) {
  at::manual_seed(7);
  for (const std::int64_t queries : {1, 20}) {
    auto p = draw({"gaps", {queries, queries}, {30, 25}, 4, 2, 16, 16, 40});
    const auto clean = differentiate(entry(p, attend), p.inputs, p.weights);
    for (const int i : {1, 2}) {
      p.inputs[i].narrow(0, 30, 10).fill_(std::numeric_limits<double>::quiet_NaN());
      p.inputs[i].narrow(0, 65, 15).fill_(std::numeric_limits<double>::infinity());
    }
    const auto dirty = differentiate(entry(p, attend), p.inputs, p.weights);
    EXPECT_TRUE(dirty.outputs[0].equal(clean.outputs[0]));
    for (const int i : {0, 1, 2}) EXPECT_TRUE(dirty.gradients[i].equal(clean.gradients[i])) << kInputs[i];
    for (const int i : {1, 2}) {
      EXPECT_EQ(dirty.gradients[i].narrow(0, 30, 10).abs().max().item<double>(), 0);
      EXPECT_EQ(dirty.gradients[i].narrow(0, 65, 15).abs().max().item<double>(), 0);
    }
  }
}

TEST(Attention, DecodingTokenByTokenEqualsOneForward) {
  at::manual_seed(8);
  const std::int64_t tokens = 70;
  const auto p = draw({"whole", {tokens}, {tokens}, 4, 2, 16, 16});
  const auto whole = entry(p, attend)(p.inputs)[0];
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto one = attend(p.inputs[0].narrow(0, t, 1), p.inputs[1], p.inputs[2], cu_seqlens_of({1}), p.cu_seqlens_k,
                            at::tensor({t + 1}, at::TensorOptions().dtype(kInt)), p.scale);
    EXPECT_LT(relative_error(one, whole.narrow(0, t, 1)), 1e-12) << t;
  }
}

TEST(Attention, SlabsMayLieInAnyOrder) {
  at::manual_seed(9);
  const auto p = draw({"slabs", {3, 30}, {20, 35}, 4, 2, 16, 16, 40});
  const auto straight = differentiate(entry(p, attend), p.inputs, p.weights);
  auto swapped = p;
  swapped.cu_seqlens_k = at::tensor({40, 0, 0}, at::TensorOptions().dtype(kInt));
  const auto swap = [](const Tensor& x) { return at::cat({x.narrow(0, 40, 40), x.narrow(0, 0, 40)}); };
  const auto got =
      differentiate(entry(swapped, attend), {p.inputs[0], swap(p.inputs[1]), swap(p.inputs[2])}, p.weights);
  EXPECT_TRUE(got.outputs[0].equal(straight.outputs[0]));
  EXPECT_TRUE(got.gradients[0].equal(straight.gradients[0]));
  for (const int i : {1, 2}) EXPECT_TRUE(swap(got.gradients[i]).equal(straight.gradients[i])) << kInputs[i];
}

TEST(Attention, QueryHeadsUseTheirOwnKvHead) {
  at::manual_seed(10);
  for (const std::int64_t queries : {1, 40}) {
    auto p = draw({"groups", {queries}, {40}, 6, 2, 8, 8, 40});
    const auto before = entry(p, attend)(p.inputs)[0];
    p.inputs[2].select(1, 1).zero_();
    const auto after = entry(p, attend)(p.inputs)[0];
    EXPECT_TRUE(after.narrow(1, 0, 3).equal(before.narrow(1, 0, 3)));
    EXPECT_EQ(after.narrow(1, 3, 3).abs().max().item<double>(), 0);
  }
}

// Scores of +-1e4: the softmax is a choice of the largest.
TEST(Attention, ExtremeScoresStayFinite) {
  for (const auto type : {kFloat, kBFloat16}) {
    for (const std::int64_t queries : {1, 300}) {
      at::manual_seed(11);
      auto p = draw({"extreme", {queries}, {300}, 4, 2, 16, 16, 300});
      p.inputs[0].mul_(1e4);
      const auto got = differentiate(entry(p, attend), to_type(p.inputs, type), p.weights);
      EXPECT_TRUE(got.outputs[0].isfinite().all().item<bool>());
      for (const int i : {0, 1, 2}) EXPECT_TRUE(got.gradients[i].isfinite().all().item<bool>()) << kInputs[i];
      const auto want = entry(p, attention_definition)(to_type(to_type(p.inputs, type), kDouble))[0];
      EXPECT_LT(relative_error(got.outputs[0], want), 1e-2);  // ties of scores apart by less than their rounding
    }
  }
}

TEST(Attention, NanIsNotHidden) {
  at::manual_seed(12);
  for (const std::int64_t queries : {1, 40}) {
    auto p = draw({"nan", {queries}, {40}, 2, 1, 16, 16, 40});
    p.inputs[1][5][0][3] = std::numeric_limits<double>::quiet_NaN();
    const auto out = entry(p, attend)(to_type(p.inputs, kFloat))[0];
    EXPECT_TRUE(out[queries - 1].isnan().all().item<bool>());
  }
}

TEST(Attention, RefusesWhatItCannotMean) {
  auto p = draw({"errors", {8, 2}, {10, 4}, 4, 2, 8, 8, 12});
  const auto call = [&] { return entry(p, attend)(p.inputs); };
  const auto expect_error = [&](const std::string& part, const auto& function) {
    try {
      function();
      FAIL() << "expected an error with: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  const auto good = p;
  p.inputs[0] = good.inputs[0].narrow(1, 0, 3);
  expect_error("Hq a multiple of Hkv", call);
  p = good;
  p.inputs[1] = good.inputs[1].to(kFloat);
  expect_error("must have one dtype", call);
  p = good;
  p.seqused_k = at::tensor({13, 13}, at::TensorOptions().dtype(kInt));
  expect_error("the 13 keys of sequence 1 begin at row 12 of k, which has 24 rows", call);
  p = good;
  p.seqused_k = std::nullopt;
  p.cu_seqlens_k = cu_seqlens_of({10, 4});
  expect_error("end with the number of tokens, 24", call);
  p = good;
  p.cu_seqlens_k = cu_seqlens_of({4, 4});
  const auto short_of_one = [&] {
    attention(good.inputs[0], good.inputs[1], good.inputs[2], good.cu_seqlens_q, good.cu_seqlens_k, good.seqused_k, 7,
              10, 1);
  };
  expect_error("sequence 0 has 8 queries and 10 keys; max_seqlen_q = 7", short_of_one);
  expect_error("two sequences share the keys from row 4 on",
               [&] { differentiate(entry(p, attend), p.inputs, p.weights); });
  EXPECT_NO_THROW(call());  // a shared prefix is fine where no gradient is asked for
}

}  // namespace
}  // namespace sluice
