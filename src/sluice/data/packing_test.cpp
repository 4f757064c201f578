// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "sluice/core/error.h"

namespace sluice {
namespace {

using testing::ElementsAre;

// Token values tell sample and place: 1000 * sample + place.
Sample sample_of(std::int64_t place, std::size_t size, std::size_t prompt = 1) {
  Sample sample{std::vector<TokenId>(size), std::vector<std::uint8_t>(size, 1), "test", 0};
  std::iota(sample.tokens.begin(), sample.tokens.end(), static_cast<TokenId>(1000 * place));
  std::fill_n(sample.loss_mask.begin(), prompt, 0);
  return sample;
}

std::vector<Sample> samples_of(std::int64_t count, std::size_t longest) {
  std::vector<Sample> samples;
  for (std::int64_t i = 0; i < count; ++i)
    samples.push_back(sample_of(i, 2 + static_cast<std::size_t>(i * 7919) % (longest - 1)));
  return samples;
}

std::vector<std::vector<std::int64_t>> ids_of(const std::vector<PackedBatch>& step) {
  std::vector<std::vector<std::int64_t>> ids;
  for (const auto& batch : step) ids.push_back(batch.samples);
  return ids;
}

TEST(Pack, TargetsStayInsideTheirSequence) {
  const std::vector<Sample> dataset = {sample_of(0, 4, 2), sample_of(1, 3, 0)};
  const auto batch = pack(dataset, std::vector<std::int64_t>{0, 1});
  EXPECT_THAT(batch.tokens, ElementsAre(0, 1, 2, 3, 1000, 1001, 1002));
  EXPECT_THAT(batch.cu_seqlens, ElementsAre(0, 4, 7));
  EXPECT_THAT(batch.targets, ElementsAre(-100, 2, 3, -100, 1001, 1002, -100));
  EXPECT_THAT(batch.loss_weight, ElementsAre(0, 1, 1, 0, 1, 1, 0));
}

// T1: the divisor counts trained tokens only, and a batch without any is well formed.
TEST(Pack, AMaskedSampleAddsNoTargets) {
  const std::vector<Sample> dataset = {sample_of(0, 5, 1), sample_of(1, 6, 6)};
  const auto targets_of = [&](const std::vector<std::int64_t>& samples) {
    return std::ranges::count_if(pack(dataset, samples).targets, [](auto target) { return target != kIgnoredTarget; });
  };
  EXPECT_EQ(targets_of({0}), 4);
  EXPECT_EQ(targets_of({0, 1}), 4);
  const auto masked = pack(dataset, std::vector<std::int64_t>{1});
  EXPECT_EQ(masked.tokens.size(), 6U);
  EXPECT_THAT(masked.targets, testing::Each(kIgnoredTarget));
  EXPECT_THAT(masked.loss_weight, testing::Each(0.0F));
}

TEST(Shuffled, IsAPermutationThatDependsOnSeedAndEpochAlone) {
  auto order = shuffled(1000, 42, 3);
  EXPECT_EQ(order, shuffled(1000, 42, 3));
  EXPECT_NE(order, shuffled(1000, 42, 4));
  EXPECT_NE(order, shuffled(1000, 43, 3));
  std::sort(order.begin(), order.end());
  for (std::int64_t i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

// The order is part of what a resumed run relies on, so it may not change with machine or compiler.
TEST(Shuffled, IsTheSameEverywhere) { EXPECT_THAT(shuffled(8, 42, 0), ElementsAre(7, 4, 3, 1, 5, 0, 2, 6)); }

// With 120 equally likely orders of five and 12,000 epochs each is expected 100 times, standard deviation 10: 6 of
// them.
TEST(Shuffled, GivesEveryOrderAboutEquallyOften) {
  std::map<std::vector<std::int64_t>, int> seen;
  for (std::uint64_t epoch = 0; epoch < 12'000; ++epoch) ++seen[shuffled(5, 1, epoch)];
  EXPECT_EQ(seen.size(), 120U);
  for (const auto& [order, count] : seen) EXPECT_NEAR(count, 100, 60);
}

TEST(BestFitPacks, PutsEachSequenceIntoTheFullestPackWithRoom) {
  const std::vector<std::int64_t> lengths = {4, 6, 3, 7, 2, 10};
  const std::vector<std::int64_t> order = {0, 1, 2, 3, 4, 5};
  EXPECT_THAT(best_fit_packs(order, lengths, 10),
              ElementsAre(ElementsAre(5), ElementsAre(3, 2), ElementsAre(1, 0), ElementsAre(4)));
}

TEST(BatchStream, AnEpochHoldsEverySampleOnceInPacksOfAtMostSeqLen) {
  const auto dataset = samples_of(500, 100);
  BatchStream stream(dataset, {.seq_len = 128, .tokens_per_step = 1024, .seed = 7});
  std::multiset<std::int64_t> seen;
  std::int64_t tokens = 0;
  std::int64_t packs = 0;
  while (stream.position().epoch == 0) {
    for (const auto& batch : stream.next()) {
      EXPECT_LE(batch.tokens.size(), 128U);
      seen.insert(batch.samples.begin(), batch.samples.end());
      tokens += std::ssize(batch.tokens);
      ++packs;
    }
  }
  EXPECT_EQ(seen.size(), 500U);
  EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), 500U);
  // Best fit decreasing needs at most 11/9 of the best number of packs and one more (Johnson 1973).
  EXPECT_LE(packs, tokens / 128 * 11 / 9 + 2);
}

TEST(BatchStream, AStepHasAboutTheTokensAskedFor) {
  const auto dataset = samples_of(500, 100);
  const StreamOptions options{.seq_len = 128, .tokens_per_step = 1000, .seed = 7};
  BatchStream stream(dataset, options);
  const auto steps = stream.steps_in_epoch(0);
  for (std::int64_t i = 0; i < steps; ++i) {
    std::int64_t tokens = 0;
    for (const auto& batch : stream.next()) tokens += std::ssize(batch.tokens);
    if (i + 1 == steps) break;                               // what the epoch has left
    EXPECT_NEAR(static_cast<double>(tokens), 1000.0, 64.0);  // half a pack
  }
  EXPECT_EQ(stream.position(), (DataPosition{1, 0}));
}

TEST(BatchStream, WithoutPackingEachPackHoldsOneSequence) {
  const auto dataset = samples_of(20, 30);
  BatchStream stream(dataset, {.seq_len = 64, .tokens_per_step = 100, .seed = 1, .packing = false});
  for (const auto& batch : stream.next()) EXPECT_EQ(batch.samples.size(), 1U);
}

// T2: 10 steps equal 4 steps, saved as JSON, and 6 more in a new stream, also across the end of an epoch.
TEST(BatchStream, ResumesExactlyWhereItWas) {
  const auto dataset = samples_of(60, 40);
  const StreamOptions options{.seq_len = 64, .tokens_per_step = 256, .seed = 5};
  for (const int before : {0, 1, 4, 5, 9}) {
    BatchStream unbroken(dataset, options);
    BatchStream first(dataset, options);
    for (int i = 0; i < before; ++i) EXPECT_EQ(ids_of(first.next()), ids_of(unbroken.next()));
    const auto saved = nlohmann::json(first.position()).dump();
    BatchStream second(dataset, options);
    second.restore(nlohmann::json::parse(saved).get<DataPosition>());
    for (int i = before; i < 12; ++i) {
      EXPECT_EQ(ids_of(second.next()), ids_of(unbroken.next()));
      EXPECT_EQ(second.position(), unbroken.position());
    }
    EXPECT_GE(unbroken.position().epoch, 1);
  }
}

TEST(BatchStream, RefusesWhatCannotBe) {
  const auto dataset = samples_of(10, 40);
  const auto message = [](const auto& act) -> std::string {
    try {
      act();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message([&] { BatchStream(dataset, {.seq_len = 8}); }), testing::HasSubstr("seq_len is 8"));
  EXPECT_THAT(message([&] { BatchStream({}, {}); }), testing::HasSubstr("at least one sample"));
  EXPECT_THAT(message([&] {
                BatchStream(dataset, {.seq_len = 64}).restore({0, 99});
              }),
              testing::HasSubstr("cannot go on at pack 99 of epoch 0"));
  EXPECT_THAT(message([&] { nlohmann::json::parse(R"({"epoch": 1})").get<DataPosition>(); }),
              testing::HasSubstr("needs index"));
}

}  // namespace
}  // namespace sluice
