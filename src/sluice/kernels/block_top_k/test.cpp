// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/block_top_k/block_top_k.h"
#include "sluice/kernels/block_top_k/cases.h"
#include "sluice/kernels/common/testing.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const auto kI32 = at::TensorOptions().dtype(kInt);

struct Problem {
  Tensor q, block_keys, cu_seqlens_q, cu_blocks, seqused_k;
  std::int64_t block_size, top_k;
};

// `values` draws q and the block keys.
Problem draw(const BlockTopKCase& c, const std::function<Tensor(at::IntArrayRef)>& values) {
  std::vector<std::int64_t> blocks;
  for (const auto keys : c.keys) blocks.push_back(c.slab > 0 ? c.slab : keys / c.block_size);
  const auto sum = [](const auto& x) { return std::accumulate(x.begin(), x.end(), std::int64_t{0}); };
  return {.q = values({sum(c.queries), c.heads, c.dim}),
          .block_keys = values({sum(blocks), c.dim}),
          .cu_seqlens_q = cu_seqlens_of(c.queries),
          .cu_blocks = cu_seqlens_of(blocks),
          .seqused_k = at::tensor(c.keys, kI32),
          .block_size = c.block_size,
          .top_k = c.top_k};
}

Tensor small_integers(at::IntArrayRef shape) { return at::randint(-2, 3, shape, at::TensorOptions().dtype(kDouble)); }
Tensor normal(at::IntArrayRef shape) { return at::randn(shape, at::TensorOptions().dtype(kDouble)); }

Tensor run(const Problem& p, decltype(block_top_k)& function, at::ScalarType type) {
  return function(p.q.to(type), p.block_keys.to(type), p.cu_seqlens_q, p.cu_blocks, p.seqused_k, p.block_size, p.top_k,
                  0.25);
}

// Products of small integers are exact in every dtype and order, so that equal scores, of which there are many, are
// equal for both.
TEST(BlockTopK, MatchesItsDefinitionTiesAndAll) {
  for (const auto& c : block_top_k_cases()) {
    for (const auto type : {kDouble, kFloat, kBFloat16}) {
      SCOPED_TRACE(c.name + " " + c10::toString(type));
      at::manual_seed(1);
      const auto p = draw(c, small_integers);
      EXPECT_TRUE(run(p, block_top_k, type).equal(run(p, block_top_k_definition, kDouble)));
    }
  }
}

TEST(BlockTopK, MatchesItsDefinitionOnRandomScores) {
  for (const auto& c : block_top_k_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    const auto p = draw(c, normal);
    EXPECT_TRUE(run(p, block_top_k, kDouble).equal(run(p, block_top_k_definition, kDouble)));
  }
}

// A score of float32 is off by some 1e-6 of its size: whatever is taken is at most that far below what is left.
TEST(BlockTopK, TakesNoBlockThatIsWorseThanOneItLeaves) {
  at::manual_seed(3);
  const auto p = draw({"float32", {300}, {300}, 4, 64, 4, 8}, normal);
  const auto chosen = run(p, block_top_k, kFloat);
  const auto products = at::einsum("thd,bd->thb", {p.q.to(kFloat).to(kDouble), p.block_keys.to(kFloat).to(kDouble)});
  const auto scores = products.relu().sum(1);
  for (std::int64_t t = 0; t < 300; ++t) {
    const auto count = (t + 1) / 4, taken = std::min<std::int64_t>(8, count);
    const auto blocks = chosen[t].narrow(0, 0, taken).to(kLong);
    auto left = scores[t].narrow(0, 0, count).clone();
    const auto own = left.index_select(0, blocks);
    left.index_fill_(0, blocks, -1);
    if (taken < count) {
      EXPECT_GE(own.min().item<double>() * (1 + 4e-6) + 1e-5, left.max().item<double>()) << t;
    }
    EXPECT_TRUE((chosen[t].narrow(0, taken, 8 - taken) == -1).all().item<bool>()) << t;
  }
}

TEST(BlockTopK, OfEqualScoresTheLowerBlockIsTaken) {
  auto p = draw({"ties", {24}, {24}, 2, 8, 4, 3}, normal);
  p.q.fill_(-1);
  p.block_keys.fill_(1);  // every product is negative and every score 0
  EXPECT_TRUE(run(p, block_top_k, kFloat)[23].equal(at::tensor({0, 1, 2}, kI32)));
  p.block_keys[4].fill_(-1);
  EXPECT_TRUE(run(p, block_top_k, kFloat)[23].equal(at::tensor({0, 1, 4}, kI32)));
  p.block_keys[4].fill_(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(run(p, block_top_k, kFloat)[23].equal(at::tensor({0, 1, 2}, kI32)));
}

TEST(BlockTopK, ASequenceIsTheSameInEveryPackAndThroughACache) {
  at::manual_seed(4);
  const std::vector<std::int64_t> lengths{5, 130, 77};
  const auto p = draw({"pack", lengths, lengths, 4, 16, 4, 6}, normal);
  const auto packed = run(p, block_top_k, kFloat);
  std::int64_t token = 0, block = 0;
  for (const auto length : lengths) {
    SCOPED_TRACE(length);
    auto alone = p;
    alone.q = p.q.narrow(0, token, length);
    alone.block_keys = p.block_keys.narrow(0, block, length / 4);
    alone.cu_seqlens_q = cu_seqlens_of({length});
    alone.cu_blocks = cu_seqlens_of({length / 4});
    alone.seqused_k = at::tensor({length}, kI32);
    EXPECT_TRUE(run(alone, block_top_k, kFloat).equal(packed.narrow(0, token, length)));
    for (std::int64_t t = 0; t < length; ++t) {
      auto step = alone;
      step.q = alone.q.narrow(0, t, 1);
      step.cu_seqlens_q = cu_seqlens_of({1});
      step.seqused_k = at::tensor({t + 1}, kI32);
      EXPECT_TRUE(run(step, block_top_k, kFloat)[0].equal(packed[token + t])) << t;
    }
    token += length;
    block += length / 4;
  }
}

TEST(BlockTopK, RefusesWhatItCannotMean) {
  const auto good = draw({"errors", {8, 2}, {10, 4}, 2, 8, 2, 2}, normal);
  const auto call = [](const Problem& p) { return [p] { run(p, block_top_k, kFloat); }; };
  auto p = good;
  p.block_keys = good.block_keys.narrow(1, 0, 7);
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("q must be [Tq, H, d] and block_keys [B, d]")));
  p = good;
  p.top_k = 0;
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("must be at least 1 and scale positive; got 2, 0")));
  p = good;
  p.seqused_k = at::tensor({10, 6}, kI32);
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("the 3 complete blocks of sequence 1's 6 keys begin at row 5")));
  p = good;
  p.cu_seqlens_q = cu_seqlens_of({8, 3});
  EXPECT_THAT(call(p), ThrowsMessage<Error>(HasSubstr("end with the number of tokens, 10")));
}

}  // namespace
}  // namespace sluice
