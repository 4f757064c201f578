// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/sampler.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "sluice/core/error.h"
#include "sluice/sample/device_sampler.h"
#include "sluice/sample/random.h"

namespace sluice {
namespace {

using Row = std::vector<float>;

// What sampler.h says, in float64 and with a full sort: the probability of every id.
std::vector<double> distribution(const Row& logits, const SamplingParameters& p, const std::vector<TokenId>& seen) {
  std::vector<double> z(logits.begin(), logits.end());
  for (const auto id : seen) z[id] = z[id] > 0 ? z[id] / p.repetition_penalty : z[id] * p.repetition_penalty;
  std::vector<std::size_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](auto a, auto b) { return z[a] > z[b]; });
  const auto top = z[order[0]];
  std::vector<double> weight(z.size());
  for (std::size_t i = 0; i < z.size(); ++i) weight[i] = std::exp((z[i] - top) / p.temperature);

  if (p.top_k > 0 && p.top_k < static_cast<std::int64_t>(z.size())) {
    const auto lowest = z[order[p.top_k - 1]];
    for (std::size_t i = 0; i < z.size(); ++i) weight[i] = z[i] < lowest ? 0 : weight[i];
  }
  if (p.top_p < 1) {
    const auto total = std::accumulate(weight.begin(), weight.end(), 0.0);
    double before = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto own = weight[order[i]];
      if (i > 0 && before >= p.top_p * total) weight[order[i]] = 0;
      before += own;
    }
  }
  for (auto& w : weight) w = w < p.min_p ? 0 : w;  // the largest weight is 1
  const auto total = std::accumulate(weight.begin(), weight.end(), 0.0);
  for (auto& w : weight) w /= total;
  return weight;
}

Row normal_row(std::size_t size, double deviation, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(deviation));
  Row row(size);
  for (auto& z : row) z = normal(generator);
  return row;
}

struct Case {
  const char* name;
  SamplingParameters parameters;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> list{
      {"plain", {}},
      {"hot", {.temperature = 2.5}},
      {"cold", {.temperature = 0.2}},
      {"one", {.top_k = 1}},
      {"top-k", {.temperature = 0.8, .top_k = 20}},
      {"top-k beyond the vocabulary", {.top_k = 1'000'000}},
      {"top-p", {.top_p = 0.9}},
      {"top-p 0 keeps the largest", {.top_p = 0}},
      {"small top-p", {.top_p = 0.05}},
      {"nearly all", {.top_p = 0.9999}},
      {"min-p", {.min_p = 0.1}},
      {"min-p 1 keeps what ties with the largest", {.min_p = 1}},
      {"penalty", {.repetition_penalty = 1.3}},
      {"reward", {.repetition_penalty = 0.7}},
      {"all", {.temperature = 0.7, .top_k = 50, .top_p = 0.8, .min_p = 0.02, .repetition_penalty = 1.1}},
  };
  return list;
}

TEST(Random, PhiloxGivesThePublishedNumbers) {  // known answers of Random123
  using Words = std::array<std::uint32_t, 4>;
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, EveryPlaceHasItsOwnNumber) {
  std::map<double, int> seen;
  for (std::uint64_t seed : {0ULL, 1ULL, 1ULL << 32})
    for (std::uint64_t sequence : {0ULL, 1ULL, 1ULL << 32})
      for (std::uint64_t position = 0; position < 100; ++position) {
        const auto u = uniform(seed, sequence, position);
        EXPECT_TRUE(u >= 0 && u < 1);
        ++seen[u];
      }
  EXPECT_EQ(seen.size(), 900);
}

// The id and the log-probability of a draw follow from the definition for every random number, one row at a time and
// many at once.
TEST(Sampler, EqualsItsDefinition) {
  for (const auto& [name, parameters] : cases()) {
    for (const std::size_t size : {1, 5, 64, 1023, 5000}) {
      for (const bool ties : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, {} ids, ties {}", name, size, ties));
        auto logits = normal_row(size, 3, size);
        if (ties) {
          for (auto& z : logits) z = std::round(z);
        }
        std::vector<TokenId> seen;
        for (std::size_t id = 0; id < size; id += 3) seen.push_back(static_cast<TokenId>(id));
        const auto wanted = distribution(logits, parameters, seen);
        Sampler sampler(static_cast<std::int64_t>(size));
        std::vector<RowToSample> rows;
        for (int i = 0; i < 200; ++i) rows.push_back({parameters, seen, uniform(7, size, i)});
        auto all_drawn = draw_rows(at::tensor(logits).expand({200, -1}), static_cast<std::int64_t>(size), rows);
        for (const auto& row : rows) all_drawn.push_back(sampler.draw(logits, parameters, seen, row.random));
        for (std::size_t i = 0; i < all_drawn.size(); ++i) {
          const auto& drawn = all_drawn[i];
          const auto random = rows[i % rows.size()].random;
          ASSERT_GT(wanted[drawn.id], 0) << "id " << drawn.id << " was filtered out";
          // Float32 scores of at most 16 / 0.2 carry 5e-6; the exponential 2e-7 and sums over equal signs less.
          EXPECT_NEAR(drawn.logprob, std::log(wanted[drawn.id]), 1e-5);
          const auto begin = std::accumulate(wanted.begin(), wanted.begin() + drawn.id, 0.0);
          EXPECT_GE(random, begin - 1e-5);
          EXPECT_LE(random, begin + wanted[drawn.id] + 1e-5);
        }
      }
    }
  }
}

// Pearson's statistic over the kept ids stays below its 1 - 1e-4 quantile.
TEST(Sampler, DrawsInProportion) {
  const auto logits = normal_row(12, 1.5, 3);
  for (const auto& [name, parameters] : cases()) {
    SCOPED_TRACE(name);
    const auto wanted = distribution(logits, parameters, {0, 3});
    std::vector<int> counts(logits.size());
    constexpr int kDraws = 20000;
    Sampler sampler(12);
    for (int i = 0; i < kDraws; ++i)
      ++counts[sampler.draw(logits, parameters, std::vector<TokenId>{0, 3}, uniform(1, 0, i)).id];
    double statistic = 0;
    for (std::size_t id = 0; id < logits.size(); ++id) {
      const auto expected = wanted[id] * kDraws;
      if (expected == 0) EXPECT_EQ(counts[id], 0);
      else statistic += (counts[id] - expected) * (counts[id] - expected) / expected;
    }
    EXPECT_LT(statistic, 37.4);  // 11 degrees of freedom; fewer with filters
  }
}

// Sampler and trainer mean the same: without filters the log-probability is log_softmax(z / T), at temperature 0 that
// of the untempered softmax.
TEST(Sampler, LogProbabilitiesAreOfTheTemperedSoftmax) {
  const auto logits = normal_row(1000, 4, 11);
  Sampler sampler(1000);
  for (const double temperature : {0.0, 0.7, 1.0}) {
    const SamplingParameters parameters{.temperature = temperature};
    const auto drawn = sampler.draw(logits, parameters, {}, 0.4);
    const auto plain = distribution(logits, {}, {});
    const auto wanted = distribution(logits, {.temperature = temperature == 0 ? 1 : temperature}, {});
    EXPECT_NEAR(drawn.logprob, std::log(wanted[drawn.id]), 1e-5);
    EXPECT_NEAR(drawn.model_logprob, std::log(plain[drawn.id]), 1e-5);
  }
}

TEST(Sampler, TemperatureZeroTakesTheLargestAndOfEqualOnesTheLowestId) {
  Sampler sampler(5);
  const Row logits{1, 3, 2, 3, -1};
  EXPECT_EQ(sampler.draw(logits, {.temperature = 0}, {}, 0.99).id, 1);
  EXPECT_EQ(sampler.draw(logits, {.temperature = 0, .repetition_penalty = 1.5}, std::vector<TokenId>{1}, 0.99).id, 3);
}

TEST(DeviceSampler, EveryRowHasItsOwnParameters) {
  const SamplingParameters greedy{.temperature = 0}, penalized{.temperature = 0, .repetition_penalty = 1.5}, plain{},
      narrow{.top_k = 1};
  const std::vector<TokenId> seen{1, 6};  // 6 lies beyond the ids that may be drawn
  const std::vector<RowToSample> rows{{greedy, {}, 0.99}, {penalized, seen, 0.99}, {plain, {}, 0.999}, {narrow, {}, 0}};
  const auto row = at::tensor(std::vector<float>{1, 3, 2, 3, -1, 9, 9}).to(kBFloat16);
  const auto drawn = draw_rows(row.expand({4, -1}), 5, rows);
  EXPECT_EQ(drawn[0].id, 1);
  EXPECT_EQ(drawn[1].id, 3);
  EXPECT_EQ(drawn[2].id, 4);
  EXPECT_TRUE(drawn[3].id == 1) << "both 1 and 3 stay, the random number takes the first";
  EXPECT_EQ(drawn[0].logprob, drawn[0].model_logprob);
  EXPECT_NEAR(drawn[3].logprob, std::log(0.5), 1e-6);
}

TEST(DeviceSampler, TakesMaskedIdsButNoDamagedOnes) {
  const SamplingParameters plain{}, greedy{.temperature = 0};
  const auto inf = std::numeric_limits<float>::infinity();
  const std::vector<RowToSample> rows{{plain, {}, 0.5}, {greedy, {}, 0.5}};
  const auto masked = at::tensor(std::vector<float>{-inf, 2, -inf}).expand({2, -1});
  for (const auto& drawn : draw_rows(masked, 3, rows)) EXPECT_EQ(drawn.id, 1);
  for (const float bad : {std::nanf(""), inf}) {
    const auto damaged = at::stack({at::zeros(3), at::tensor(std::vector<float>{0, bad, 1})});
    EXPECT_THROW(draw_rows(damaged, 3, rows), Error);
  }
}

TEST(Sampler, NeverDrawsAnIdBeyondTheTokenizer) {
  const Row equal(152576, 0.0F);
  Sampler sampler(151669);
  for (int i = 0; i < 10000; ++i) ASSERT_LT(sampler.draw(equal, {}, {}, uniform(5, 0, i)).id, 151669);
  EXPECT_LT(sampler.draw(equal, {}, {}, std::nextafter(1.0, 0.0)).id, 151669);
  Row padding_is_largest(8, 0.0F);
  padding_is_largest[7] = 100;
  EXPECT_EQ(Sampler(7).draw(padding_is_largest, {.temperature = 0}, {}, 0).id, 0);
}

TEST(Sampler, NeverDrawsAMaskedId) {
  const auto masked = -std::numeric_limits<float>::infinity();
  Sampler sampler(4);
  for (const double random : {0.0, 0.5, 1 - 0x1p-53}) {
    EXPECT_EQ(sampler.draw(Row{masked, 2, masked, masked}, {}, {}, random).id, 1);
  }
}

TEST(Sampler, RefusesLogitsThatAreNotFinite) {
  Sampler sampler(3);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (const double temperature : {0.0, 1.0}) {
      try {
        sampler.draw(Row{0, bad, 1}, {.temperature = temperature}, {}, 0.5);
        FAIL() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kNan);
      }
    }
  }
}

TEST(Sampler, ParametersOutOfRangeAreNamed) {
  const std::vector<std::pair<SamplingParameters, std::string>> bad{{{.temperature = -1}, "temperature"},
                                                                    {{.top_k = -1}, "top_k"},
                                                                    {{.top_p = 1.5}, "top_p"},
                                                                    {{.min_p = -0.1}, "min_p"},
                                                                    {{.repetition_penalty = 0}, "repetition_penalty"},
                                                                    {{.temperature = std::nan("")}, "temperature"}};
  for (const auto& [parameters, name] : bad) {
    try {
      parameters.check();
      FAIL() << "no error for " << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace sluice
