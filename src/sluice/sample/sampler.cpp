// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/sampler.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <limits>

#include "sluice/core/error.h"
#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"

namespace sluice {
namespace {

constexpr std::size_t kBlock = 1024;  // weights are summed a block at a time, so that a pick skips whole blocks

SLUICE_MULTIARCH float largest(const float* x, std::size_t count) {
  return lane_max(x, static_cast<std::int64_t>(count));
}

// weights[i] = exp((x[i] - top) scale); their sum.
SLUICE_MULTIARCH double exponentials(const float* __restrict x, std::size_t count, float top, float scale,
                                     float* __restrict weights) {
  for (std::size_t i = 0; i < count; ++i) weights[i] = exp_nonpositive((x[i] - top) * scale);
  return lane_sum<float>(static_cast<std::int64_t>(count), [weights](std::int64_t i) { return weights[i]; });
}

}  // namespace

void SamplingParameters::check() const {
  const auto require = [](bool holds, const char* name, double value, const char* range) {
    if (!holds) fail_usage("sampling: {} must be {}; got {}", name, range, value);
  };
  require(temperature >= 0 && std::isfinite(temperature), "temperature", temperature, "0 or above");
  require(top_k >= 0, "top_k", static_cast<double>(top_k), "0 (all) or above");
  require(top_p >= 0 && top_p <= 1, "top_p", top_p, "from 0 to 1");
  require(min_p >= 0 && min_p <= 1, "min_p", min_p, "from 0 to 1");
  require(repetition_penalty > 0 && std::isfinite(repetition_penalty), "repetition_penalty", repetition_penalty,
          "above 0");
}

std::span<const float> Sampler::penalized(std::span<const float> logits, double penalty,
                                          std::span<const TokenId> seen) {
  penalized_.assign(logits.begin(), logits.end());
  const auto factor = static_cast<float>(penalty);
  for (const auto id : seen) {
    if (static_cast<std::size_t>(id) >= penalized_.size()) continue;
    auto& z = penalized_[static_cast<std::size_t>(id)];
    z = z > 0 ? z / factor : z * factor;
  }
  return penalized_;
}

// Fills weights_ and block_sums_; the sum of all.
double Sampler::weigh(std::span<const float> scores, float top, double temperature) {
  weights_.resize(std::max(weights_.size(), scores.size()));
  block_sums_.clear();
  const auto scale = static_cast<float>(std::min(1 / temperature, double{std::numeric_limits<float>::max()}));
  double total = 0;
  for (std::size_t first = 0; first < scores.size(); first += kBlock) {
    block_sums_.push_back(exponentials(scores.data() + first, std::min(kBlock, scores.size() - first), top, scale,
                                       weights_.data() + first));
    total += block_sums_.back();
  }
  return total;
}

Sampler::Candidates Sampler::keep_from(const Candidates& from, float lowest) {
  kept_scores_.resize(std::max(kept_scores_.size(), from.scores.size()));
  kept_ids_.resize(kept_scores_.size());
  std::size_t kept = 0;  // never ahead of i: `from` may lie in the same buffers
  for (std::size_t i = 0; i < from.scores.size(); ++i) {
    const auto score = from.scores[i];
    const auto id = from.id(i);
    if (score >= lowest) {
      kept_scores_[kept] = score;
      kept_ids_[kept++] = id;
    }
  }
  return {std::span(kept_scores_).first(kept), std::span(kept_ids_).first(kept)};
}

Sampler::Candidates Sampler::top_k(const Candidates& from, std::int64_t k) {
  if (static_cast<std::size_t>(k) >= from.scores.size()) return from;
  largest_.resize(static_cast<std::size_t>(k));
  std::partial_sort_copy(from.scores.begin(), from.scores.end(), largest_.begin(), largest_.end(), std::greater<>());
  return keep_from(from, largest_.back());
}

Sampler::Candidates Sampler::top_p(const Candidates& from, double p, float top, double temperature) {
  const auto total = weigh(from.scores, top, temperature);
  // Ids below this weight add up to at most (1 - p) of the total, so none of them is needed. The factor covers
  // rounding.
  const auto lightest = 0.999 * (1 - p) * total / static_cast<double>(from.scores.size());
  ranked_.clear();
  for (std::size_t i = 0; i < from.scores.size(); ++i) {
    if (weights_[i] >= lightest) ranked_.push_back({from.scores[i], weights_[i], from.id(i)});
  }
  // Halves the range in which the last id to keep lies, until it is one.
  auto needed = p * total;
  std::size_t first = 0, last = ranked_.size();
  while (last - first > 1) {
    const auto middle = first + (last - first) / 2;
    const auto at = [&](std::size_t place) { return ranked_.begin() + static_cast<std::ptrdiff_t>(place); };
    std::nth_element(at(first), at(middle), at(last), [](const auto& a, const auto& b) { return a.before(b); });
    double mass = 0;
    for (auto i = first; i < middle; ++i) mass += ranked_[i].weight;
    if (mass >= needed) {
      last = middle;
    } else {
      needed -= mass;
      first = middle;
    }
  }
  const auto cut = ranked_[first];
  auto kept = keep_from(from, cut.score);
  std::size_t count = 0;
  for (std::size_t i = 0; i < kept.scores.size(); ++i) {
    if (kept.scores[i] == cut.score && kept.ids[i] > cut.id) continue;
    kept_scores_[count] = kept.scores[i];
    kept_ids_[count++] = kept.ids[i];
  }
  return {kept.scores.first(count), kept.ids.first(count)};
}

// The place where the running sum of the `count` weights passes `target`; never one of weight 0.
std::size_t Sampler::pick(double target, std::size_t count) const {
  std::size_t block = 0;
  for (std::size_t i = 0; i < block_sums_.size(); ++i) {
    if (block_sums_[i] <= 0) continue;
    block = i;
    if (target < block_sums_[i]) break;
    target -= block_sums_[i];
  }
  std::size_t picked = block * kBlock;
  double sum = 0;
  for (auto i = picked; i < std::min((block + 1) * kBlock, count) && sum <= target; ++i) {
    if (weights_[i] > 0) picked = i;
    sum += weights_[i];
  }
  return picked;
}

SampledToken Sampler::draw(std::span<const float> logits, const SamplingParameters& parameters,
                           std::span<const TokenId> seen, double random) {
  assert(drawable_ > 0 && static_cast<std::size_t>(drawable_) <= logits.size());
  const auto model_top = largest(logits.data(), logits.size());
  const auto model_total = weigh(logits, model_top, 1);
  const auto log_normalizer = static_cast<double>(model_top) + std::log(model_total);
  const auto model_logprob = [&](TokenId id) {
    return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(id)]) - log_normalizer);
  };

  auto scores = logits.first(static_cast<std::size_t>(drawable_));
  if (parameters.repetition_penalty != 1) scores = penalized(scores, parameters.repetition_penalty, seen);
  const auto top = largest(scores.data(), scores.size());
  if (!std::isfinite(model_top) || !std::isfinite(model_total) || !std::isfinite(top)) {
    fail(ExitCode::kNan, "sampling: the model's logits are not finite (largest {}); its weights are damaged",
         model_top);
  }
  if (parameters.temperature == 0) {
    const auto id = static_cast<TokenId>(std::ranges::find(scores, top) - scores.begin());
    return {id, model_logprob(id), model_logprob(id)};
  }

  const auto temperature = parameters.temperature;
  Candidates candidates{scores, {}};
  if (parameters.top_k > 0) candidates = top_k(candidates, parameters.top_k);
  if (parameters.top_p < 1) candidates = top_p(candidates, parameters.top_p, top, temperature);
  if (parameters.min_p > 0) {
    candidates = keep_from(candidates, top + static_cast<float>(temperature * std::log(parameters.min_p)));
  }
  const auto total = weigh(candidates.scores, top, temperature);
  const auto place = pick(random * total, candidates.scores.size());
  const auto id = candidates.id(place);
  const auto logprob = static_cast<double>(candidates.scores[place] - top) / temperature - std::log(total);
  return {id, static_cast<float>(logprob), model_logprob(id)};
}

}  // namespace sluice
