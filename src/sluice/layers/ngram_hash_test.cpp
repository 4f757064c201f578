// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/ngram_hash.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice {
namespace {

using testing::ElementsAre;

// Qwen3.8-Flash-Next's.
const NgramHashSizes kPublished{.vocab_size = 248320,
                                .ngram_size = 3,
                                .heads_per_ngram = 8,
                                .vocab_size_base = 20000000,
                                .divisible_by = 128,
                                .seed = 1234,
                                .index = 0,
                                .eos_token_id = 248044};

std::vector<std::int64_t> rows_of(const NgramHash& hash, const std::vector<std::int64_t>& tokens) {
  std::vector<std::int64_t> rows(hash.heads());
  hash.rows(tokens, rows);
  return rows;
}

TEST(NgramHash, ItsConstantsAreThePublishedOnes) {
  const NgramHash hash(kPublished);
  EXPECT_THAT(hash.multipliers(), ElementsAre(23703573157769, 20109073645365, 8052911324071));
  EXPECT_THAT(hash.primes(),
              ElementsAre(20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077, 20000081,
                          20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171));
  EXPECT_EQ(hash.offsets()[2], 20000003 + 20000023);
  EXPECT_EQ(hash.table_rows(), 320001536);
}

TEST(NgramHash, TheNextTableGoesOnInThePrimesWithOtherMultipliers) {
  auto sizes = kPublished;
  sizes.index = 1;
  const NgramHash first(kPublished), second(sizes);
  EXPECT_GT(second.primes()[0], first.primes()[15]);
  EXPECT_EQ(second.offsets()[0], 0);
  EXPECT_NE(second.multipliers(), first.multipliers());
}

TEST(NgramHash, EachOrderMixesItsTokensAndEachHeadHasItsOwnRows) {
  const NgramHash hash(kPublished);
  const auto rows = rows_of(hash, {5, 6, 7});
  const std::uint64_t pair = 7ULL * 23703573157769 ^ 6ULL * 20109073645365, triple = pair ^ 5ULL * 8052911324071;
  for (std::int64_t h = 0; h < 16; ++h) {
    const auto prime = static_cast<std::uint64_t>(hash.primes()[h]);
    EXPECT_EQ(rows[h], hash.offsets()[h] + static_cast<std::int64_t>((h < 8 ? pair : triple) % prime));
  }
}

TEST(NgramHash, WhatLiesBeforeTheFirstTokenOrAnEndOfSequenceCountsAsEndOfSequence) {
  const NgramHash hash(kPublished);
  const std::int64_t eos = kPublished.eos_token_id;
  EXPECT_EQ(rows_of(hash, {7}), rows_of(hash, {eos, eos, 7}));
  EXPECT_EQ(rows_of(hash, {5, eos, 7}), rows_of(hash, {7}));    // the token before the end is closed off
  EXPECT_NE(rows_of(hash, {5, 6, eos}), rows_of(hash, {eos}));  // the end itself still sees what it ends
  EXPECT_EQ(rows_of(hash, {eos, 6, 7}), rows_of(hash, {6, 7}));
  EXPECT_EQ(rows_of(hash, {1, 2, 3, 5, 6, 7}), rows_of(hash, {5, 6, 7}));
}

}  // namespace
}  // namespace sluice
