// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/cases.h"
#include "sluice/kernels/common/testing.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"q", "k", "v"};
const auto kI32 = at::TensorOptions().dtype(kInt);

struct Problem {
  std::vector<Tensor> inputs;   // q, k, v (float64)
  std::vector<Tensor> weights;  // of the output in the loss
  Tensor blocks, cu_seqlens_q, cu_seqlens_k;
  std::optional<Tensor> seqused_k;
  std::int64_t block_size;
  double scale;
};

// For each query min(top_k, n) of its n complete blocks at random; every seventh query has fewer.
Tensor random_blocks(const BlockSparseAttentionCase& c, std::int64_t tokens) {
  auto blocks = at::full({tokens, c.top_k}, -1, kI32);
  std::int64_t token = 0;
  for (std::size_t n = 0; n < c.queries.size(); ++n) {
    for (std::int64_t i = 0; i < c.queries[n]; ++i, ++token) {
      const auto visible = std::max<std::int64_t>(0, c.keys[n] - c.queries[n] + i + 1);
      const auto complete = visible / c.block_size;
      const auto count = std::min(token % 7 == 6 ? c.top_k / 2 : c.top_k, complete);
      const auto chosen = std::get<0>(at::randperm(complete).narrow(0, 0, count).sort());
      blocks[token].narrow(0, 0, count).copy_(chosen);
    }
  }
  return blocks;
}

Problem draw(const BlockSparseAttentionCase& c) {
  const auto sum = [](const auto& lengths) { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); };
  const auto queries = sum(c.queries);
  const auto slabs = std::vector<std::int64_t>(c.keys.size(), c.capacity);
  const auto keys = sum(c.capacity > 0 ? slabs : c.keys);
  const auto f64 = at::TensorOptions().dtype(kDouble);
  Problem p;
  p.inputs = {at::randn({queries, c.heads, c.key_dim}, f64), at::randn({keys, c.kv_heads, c.key_dim}, f64),
              at::randn({keys, c.kv_heads, c.value_dim}, f64)};
  p.weights = {at::randn({queries, c.heads, c.value_dim}, f64)};
  p.blocks = random_blocks(c, queries);
  p.cu_seqlens_q = cu_seqlens_of(c.queries);
  p.cu_seqlens_k = cu_seqlens_of(c.capacity > 0 ? slabs : c.keys);
  if (c.capacity > 0) p.seqused_k = at::tensor(c.keys, kI32);
  p.block_size = c.block_size;
  p.scale = 1 / std::sqrt(static_cast<double>(c.key_dim));
  return p;
}

Operator entry(const Problem& p, decltype(block_sparse_attention)& function) {
  return [&p, &function](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{
        function(x[0], x[1], x[2], p.blocks, p.block_size, p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_k, p.scale)};
  };
}

void expect_equal_to_definition(const Problem& p, at::ScalarType type, double bound, double gradient_bound) {
  const auto inputs = to_type(p.inputs, type);
  const auto got = differentiate(entry(p, block_sparse_attention), inputs, p.weights);
  const auto want = differentiate(entry(p, block_sparse_attention_definition), to_type(inputs, kDouble), p.weights);
  EXPECT_EQ(got.outputs[0].scalar_type(), type);
  EXPECT_LT(relative_error(got.outputs[0], want.outputs[0]), bound);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], want.gradients[i]), gradient_bound) << "gradient of " << kInputs[i];
  }
}

// Sums of at most some hundred terms, rounded to 1e-16 each.
TEST(BlockSparseAttention, MatchesItsDefinitionInFloat64) {
  for (const auto& c : block_sparse_attention_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    expect_equal_to_definition(draw(c), kDouble, 1e-12, 1e-12);
  }
}

// A score of size 5 is rounded to 3e-7, which is the relative error of its probability; exp adds 2e-7. Gradients of
// scores are differences of numbers ten times as large.
TEST(BlockSparseAttention, MatchesItsDefinitionInFloat32) {
  for (const auto& c : block_sparse_attention_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, 2e-6, 2e-5);
  }
}

// Scores, probabilities and sums are float32; the result is rounded once, at most 2^-8 = 3.9e-3. Gradients are rounded
// once too, and D = dO . O takes the rounded output.
TEST(BlockSparseAttention, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : block_sparse_attention_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, 4e-3, 8e-3);
  }
}

TEST(BlockSparseAttention, WithEveryBlockChosenItIsCausalAttention) {
  at::manual_seed(4);
  const auto p = draw({"dense", {45}, {45}, 4, 4, 16, 16, 4, 11});
  for (std::int64_t t = 0; t < 45; ++t) p.blocks[t].narrow(0, 0, (t + 1) / 4).copy_(at::arange((t + 1) / 4));
  const auto heads_first = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const auto dense = at::scaled_dot_product_attention(heads_first(p.inputs[0]), heads_first(p.inputs[1]),
                                                      heads_first(p.inputs[2]), {}, 0, /*is_causal=*/true, p.scale);
  EXPECT_LT(relative_error(entry(p, block_sparse_attention)(p.inputs)[0], dense.squeeze(0).transpose(0, 1)), 1e-13);
}

TEST(BlockSparseAttention, PackedSequencesEqualSeparateOnesBitForBit) {
  const std::vector<std::int64_t> lengths{1, 63, 2, 300, 0, 5, 257};
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(5);
    const auto p = draw({"pack", lengths, lengths, 4, 2, 16, 16, 4, 6});
    const auto inputs = to_type(p.inputs, type);
    const auto packed = differentiate(entry(p, block_sparse_attention), inputs, p.weights);
    std::int64_t begin = 0;
    for (const auto length : lengths) {
      SCOPED_TRACE(fmt::format("{} {}", c10::toString(type), length));
      const auto part = [&](const Tensor& x) { return x.narrow(0, begin, length); };
      auto alone = p;
      alone.blocks = part(p.blocks);
      alone.cu_seqlens_q = alone.cu_seqlens_k = cu_seqlens_of({length});
      const auto one = differentiate(entry(alone, block_sparse_attention),
                                     {part(inputs[0]), part(inputs[1]), part(inputs[2])}, {part(p.weights[0])});
      EXPECT_TRUE(one.outputs[0].equal(part(packed.outputs[0])));
      for (const int i : {0, 1, 2}) EXPECT_TRUE(one.gradients[i].equal(part(packed.gradients[i]))) << kInputs[i];
      begin += length;
    }
  }
}

TEST(BlockSparseAttention, DecodingTokenByTokenEqualsOneForwardBitForBit) {
  at::manual_seed(6);
  const std::int64_t tokens = 70;
  const auto p = draw({"whole", {tokens}, {tokens}, 4, 2, 16, 16, 4, 5});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto whole = entry(p, block_sparse_attention)(inputs)[0];
  for (std::int64_t t = 0; t < tokens; ++t) {
    auto step = p;
    step.blocks = p.blocks.narrow(0, t, 1);
    step.cu_seqlens_q = cu_seqlens_of({1});
    step.seqused_k = at::tensor({t + 1}, kI32);
    EXPECT_TRUE(entry(step, block_sparse_attention)({inputs[0].narrow(0, t, 1), inputs[1], inputs[2]})[0].equal(
        whole.narrow(0, t, 1)))
        << t;
  }
}

TEST(BlockSparseAttention, GradientBitsDoNotDependOnThreads) {
  at::manual_seed(7);
  const auto p = draw({"threads", {700, 30}, {700, 30}, 4, 1, 16, 16, 4, 9});
  const auto inputs = to_type(p.inputs, kFloat);
  const auto threads = at::get_num_threads();
  const auto many = differentiate(entry(p, block_sparse_attention), inputs, p.weights);
  at::set_num_threads(1);
  const auto one = differentiate(entry(p, block_sparse_attention), inputs, p.weights);
  at::set_num_threads(threads);
  EXPECT_TRUE(one.outputs[0].equal(many.outputs[0]));
  for (const int i : {0, 1, 2}) EXPECT_TRUE(one.gradients[i].equal(many.gradients[i])) << kInputs[i];
}

// Keys that a query does not attend to may hold anything.
TEST(BlockSparseAttention, WhatIsNotChosenCountsForNothing) {
  at::manual_seed(8);
  auto p = draw({"unchosen", {3}, {42}, 4, 2, 16, 16, 4, 4, 48});
  const auto row = at::tensor({1, 4, 9, -1}, kI32);
  for (std::int64_t t = 0; t < 3; ++t) p.blocks[t].copy_(row);
  const auto clean = differentiate(entry(p, block_sparse_attention), p.inputs, p.weights);
  std::vector<std::int64_t> rows;
  for (std::int64_t j = 0; j < 48; ++j) {
    const auto block = j / 4;
    if (j >= 42 || (j < 40 && block != 1 && block != 4 && block != 9)) rows.push_back(j);
  }
  const auto unchosen = at::tensor(rows, at::TensorOptions().dtype(kLong));
  for (const int i : {1, 2}) p.inputs[i].index_fill_(0, unchosen, std::numeric_limits<double>::quiet_NaN());
  const auto dirty = differentiate(entry(p, block_sparse_attention), p.inputs, p.weights);
  EXPECT_TRUE(dirty.outputs[0].equal(clean.outputs[0]));
  for (const int i : {0, 1, 2}) EXPECT_TRUE(dirty.gradients[i].equal(clean.gradients[i])) << kInputs[i];
  for (const int i : {1, 2}) EXPECT_EQ(dirty.gradients[i].index_select(0, unchosen).abs().max().item<double>(), 0);
}

// Scores of +-1e4: the softmax is a choice of the largest.
TEST(BlockSparseAttention, ExtremeScoresStayFinite) {
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(9);
    auto p = draw({"extreme", {90}, {90}, 4, 2, 16, 16, 4, 5});
    p.inputs[0].mul_(1e4);
    const auto got = differentiate(entry(p, block_sparse_attention), to_type(p.inputs, type), p.weights);
    EXPECT_TRUE(got.outputs[0].isfinite().all().item<bool>());
    for (const int i : {0, 1, 2}) EXPECT_TRUE(got.gradients[i].isfinite().all().item<bool>()) << kInputs[i];
  }
}

TEST(BlockSparseAttention, RefusesWhatItCannotMean) {
  const auto good = draw({"errors", {8, 2}, {10, 4}, 4, 2, 8, 8, 2, 2, 12});
  const auto call = [](const Problem& p) { return [p] { entry(p, block_sparse_attention)(p.inputs); }; };
  auto p = good;
  p.blocks = good.blocks.to(kLong);
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("blocks must be int32 [Tq=10, K]")));
  p = good;
  p.blocks = good.blocks.clone();
  p.blocks[9].copy_(at::tensor({1, 0}, kI32));
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("blocks[9][1] is 0; the blocks of a query rise")));
  p.blocks[9].copy_(at::tensor({1, 2}, kI32));
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("blocks[9][1] is 2; the blocks of a query rise, and this one "
                                                      "sees 2 complete blocks")));
  p = good;
  p.block_size = 0;
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("block_size must be at least 1; got 0")));
  p = good;
  p.cu_seqlens_k = cu_seqlens_of({4, 8});
  EXPECT_THAT([&] { differentiate(entry(p, block_sparse_attention), p.inputs, p.weights); },
              ThrowsMessage<Error>(HasSubstr("two sequences share the keys from row 4 on")));
}

}  // namespace
}  // namespace sluice
