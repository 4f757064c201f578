// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sluice/core/error.h"
#include "sluice/kernels/draw_tokens/cases.h"
#include "sluice/kernels/draw_tokens/draw_tokens.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr auto kInfinity = std::numeric_limits<double>::infinity();

// The header's words id by id, in float64: the share of each that stays. Empty for temperature 0.
std::vector<double> shares(std::vector<double> s, const DrawSettings& settings, const std::vector<bool>& seen) {
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (seen[i]) s[i] = s[i] > 0 ? s[i] / settings.repetition_penalty : s[i] * settings.repetition_penalty;
  }
  if (settings.temperature == 0) return {};
  std::vector<std::size_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](auto a, auto b) { return s[a] > s[b]; });
  std::vector<double> weight;
  for (const auto score : s) weight.push_back(std::exp((score - s[order[0]]) / settings.temperature));
  if (settings.top_k > 0 && settings.top_k < static_cast<double>(s.size())) {
    const auto lowest = s[order[static_cast<std::size_t>(settings.top_k) - 1]];
    for (std::size_t i = 0; i < s.size(); ++i) weight[i] = s[i] < lowest ? 0 : weight[i];
  }
  if (settings.top_p < 1) {
    const auto total = std::accumulate(weight.begin(), weight.end(), 0.0);
    double before = 0;
    for (const auto id : order) {
      const auto own = weight[id];
      if (id != order[0] && before >= settings.top_p * total) weight[id] = 0;
      before += own;
    }
  }
  for (auto& w : weight) w = w < settings.min_p ? 0 : w;  // the largest weight is 1
  const auto total = std::accumulate(weight.begin(), weight.end(), 0.0);
  for (auto& w : weight) w /= total;
  return weight;
}

double log_sum(const std::vector<double>& z) {
  const auto top = std::ranges::max(z);
  double total = 0;
  for (const auto x : z) total += std::exp(x - top);
  return top + std::log(total);
}

// One row for each of the settings.
Tensor rows_of(const std::vector<DrawSettings>& settings) {
  std::vector<double> values;
  for (const auto& s : settings) {
    values.insert(values.end(), {s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.random});
  }
  return at::tensor(values, kDouble).view({-1, kDrawSettings});
}

std::vector<DrawnToken> draw(const Tensor& logits, std::int64_t drawable, const std::vector<DrawSettings>& settings,
                             const std::optional<Tensor>& seen = std::nullopt) {
  const auto count = static_cast<std::int64_t>(settings.size());
  const auto result = draw_tokens(logits.dim() == 1 ? logits.expand({count, -1}) : logits, drawable, rows_of(settings),
                                  seen ? std::optional(seen->expand({count, -1})) : std::nullopt);
  EXPECT_EQ(result.sizes(), (std::vector<std::int64_t>{count, kDrawnToken}));
  const auto* first = static_cast<const DrawnToken*>(result.const_data_ptr());
  return {first, first + count};
}

// The random number lies in the token's part of [0, 1), up to the order of sums in float64; so do the
// log-probabilities.
TEST(DrawTokens, FollowsItsWords) {
  constexpr double kRounding = 1e-12;
  constexpr std::int64_t kPadding = 3;
  for (const auto& [name, plain] : draw_tokens_cases()) {
    for (const auto size : draw_tokens_sizes()) {
      for (const auto type : {kDouble, kFloat, kBFloat16}) {  // many of bfloat16 are equal
        SCOPED_TRACE(fmt::format("{}, {} ids, {}", name, size, c10::toString(type)));
        at::manual_seed(size);
        const auto logits = (at::randn(size + kPadding, kDouble) * 3).to(type);
        const auto seen = at::rand(size) < 0.3;
        std::vector<DrawSettings> settings;
        for (const double random : {0.0, 0.1, 0.37, 0.5, 0.83, 0.999, 1 - 0x1p-53}) {
          settings.push_back(plain);
          settings.back().random = random;
        }
        const auto wide = logits.to(kDouble);
        const std::vector<double> z(wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + size + kPadding);
        const std::vector<bool> marks(seen.const_data_ptr<bool>(), seen.const_data_ptr<bool>() + size);
        const auto wanted = shares({z.begin(), z.end() - kPadding}, plain, marks);
        const auto normalizer = log_sum(z);
        const auto drawn = draw(logits, size, settings, seen);
        for (std::size_t i = 0; i < drawn.size(); ++i) {
          const auto id = static_cast<std::size_t>(drawn[i].id);
          ASSERT_LT(id, z.size() - kPadding);
          EXPECT_NEAR(drawn[i].model_logprob, z[id] - normalizer, kRounding);
          if (wanted.empty()) {
            EXPECT_EQ(drawn[i].logprob, drawn[i].model_logprob);
            continue;
          }
          ASSERT_GT(wanted[id], 0) << "id " << id << " was filtered out";
          EXPECT_NEAR(drawn[i].logprob, std::log(wanted[id]), kRounding);
          const auto begin = std::accumulate(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(id), 0.0);
          EXPECT_GE(settings[i].random, begin - kRounding);
          EXPECT_LE(settings[i].random, begin + wanted[id] + kRounding);
        }
      }
    }
  }
}

TEST(DrawTokens, TemperatureZeroTakesTheLargestAndOfEqualOnesTheLowestId) {
  const auto drawn = draw(at::tensor({1., 3., 2., 3., -1., 9.}), 5,
                          {{.temperature = 0}, {.temperature = 0, .repetition_penalty = 1.5}}, at::arange(5) == 1);
  EXPECT_EQ(drawn[0].id, 1);
  EXPECT_EQ(drawn[1].id, 3);
}

TEST(DrawTokens, OfEqualOnesTopKKeepsAllAndTopPTheLowestIds) {
  const auto equal = at::zeros(8, kFloat);
  const auto drawn = draw(equal, 8, {{.top_k = 2, .random = 0.99}, {.top_p = 0.5, .random = 0.99}});
  EXPECT_EQ(drawn[0].id, 7);
  EXPECT_NEAR(drawn[0].logprob, std::log(1. / 8), 1e-15);
  EXPECT_EQ(drawn[1].id, 3);
  EXPECT_NEAR(drawn[1].logprob, std::log(1. / 4), 1e-15);
}

TEST(DrawTokens, MaskedIdsAreNeverDrawn) {
  const auto masked = at::tensor({-kInfinity, 2., -kInfinity, 2., -kInfinity});
  for (const double random : {0.0, 0.5 - 0x1p-53, 0.5, 1 - 0x1p-53}) {
    for (auto [name, settings] : draw_tokens_cases()) {
      if (settings.repetition_penalty != 1 || settings.temperature == 0) continue;
      settings.random = random;
      const auto id = draw(masked, 5, {settings})[0].id;
      EXPECT_TRUE(id == 1 || id == 3) << name << " " << random << ": " << id;
    }
  }
}

TEST(DrawTokens, OfADamagedRowBothLogProbabilitiesAreNaN) {
  const auto is_damaged = [](const Tensor& logits) {
    for (const auto& token : draw(logits, 3, {{.random = 0.5}, {.temperature = 0}})) {
      if (!std::isnan(token.logprob) || !std::isnan(token.model_logprob)) return false;
    }
    return true;
  };
  for (const auto bad : {std::nan(""), kInfinity}) {
    EXPECT_TRUE(is_damaged(at::tensor({0., bad, 1., 0.})));
    EXPECT_TRUE(is_damaged(at::tensor({0., 1., 1., bad})));  // the model's sum spans all ids
  }
  EXPECT_TRUE(is_damaged(at::tensor({-kInfinity, -kInfinity, -kInfinity, 1.})));
  EXPECT_FALSE(is_damaged(at::tensor({-kInfinity, 0., -kInfinity, -kInfinity})));
}

TEST(DrawTokens, RefusesWhatItCannotMean) {
  const auto logits = at::zeros({2, 8});
  const auto settings = rows_of({{}, {}});
  const auto call = [](const Tensor& z, std::int64_t drawable, const Tensor& how, const std::optional<Tensor>& seen) {
    return [=] { draw_tokens(z, drawable, how, seen); };
  };
  EXPECT_THAT(call(logits[0], 8, settings, {}), ThrowsMessage<Error>(HasSubstr("logits must be [N, V]")));
  EXPECT_THAT(call(logits, 9, settings, {}), ThrowsMessage<Error>(HasSubstr("drawable 9")));
  EXPECT_THAT(call(logits, 0, settings, {}), ThrowsMessage<Error>(HasSubstr("drawable 0")));
  EXPECT_THAT(call(logits, 8, settings.to(kFloat), {}),
              ThrowsMessage<Error>(HasSubstr("settings must be float64 [N=2, 6]")));
  EXPECT_THAT(call(logits, 8, settings[0].unsqueeze(0), {}), ThrowsMessage<Error>(HasSubstr("settings must be")));
  EXPECT_THAT(call(logits, 7, settings, at::zeros({2, 8}, at::kBool)),
              ThrowsMessage<Error>(HasSubstr("seen must be bool [N=2, drawable=7]")));
}

}  // namespace
}  // namespace sluice
