// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/device_sampler.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "sluice/core/error.h"

namespace sluice {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

// One number a row, [n, 1].
template <typename Number>
Tensor column(std::span<const RowToSample> rows, at::Device device, Number number) {
  std::vector<double> values;
  for (const auto& row : rows) values.push_back(number(row));
  return at::tensor(values, kDouble).unsqueeze(1).to(device);
}

bool any(std::span<const RowToSample> rows, bool (*wanted)(const SamplingParameters&)) {
  return std::ranges::any_of(rows, [&](const RowToSample& row) { return wanted(row.parameters); });
}

bool draws(const SamplingParameters& p) { return p.temperature > 0; }
bool penalizes(const SamplingParameters& p) { return p.repetition_penalty != 1; }
bool filters(const SamplingParameters& p) { return p.top_k > 0 || p.top_p < 1 || p.min_p > 0; }

// `scores` [n, ids], changed where they lie.
void penalize(Tensor& scores, std::span<const RowToSample> rows) {
  const auto ids = scores.size(1);
  std::vector<std::int64_t> places;
  std::vector<float> factors;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (const auto id : rows[row].seen) {
      if (id >= ids) continue;
      places.push_back(static_cast<std::int64_t>(row) * ids + id);
      factors.push_back(static_cast<float>(rows[row].parameters.repetition_penalty));
    }
  }
  const auto place = at::tensor(places, kLong).to(scores.device()), factor = at::tensor(factors).to(scores.device());
  auto flat = scores.view({-1});
  const auto old = flat.index_select(0, place);
  flat.index_copy_(0, place, at::where(old > 0, old / factor, old * factor));
}

// Minus infinity for what top-k, top-p and min-p drop of `scores` [n, ids], which are divided by the temperature.
Tensor filter(const Tensor& scores, std::span<const RowToSample> rows) {
  const auto device = scores.device();
  const auto ids = scores.size(1);
  const auto [sorted, order] = scores.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
  const auto k = column(rows, device, [&](const RowToSample& row) {
    const auto top_k = row.parameters.top_k;
    return static_cast<double>(top_k == 0 ? ids : std::min(top_k, ids));
  });
  const auto lowest = sorted.gather(1, k.to(kLong) - 1);
  auto left = sorted.masked_fill(sorted < lowest, kNever);
  const auto probability = left.softmax(1, kDouble);
  const auto before = probability.cumsum(1) - probability;  // of all that are larger
  const auto top_p = column(rows, device, [](const RowToSample& row) {
    return row.parameters.top_p < 1 ? row.parameters.top_p : std::numeric_limits<double>::infinity();
  });
  auto dropped = before >= top_p;
  dropped.select(1, 0).fill_(false);  // at least one stays
  const auto min_p = column(rows, device, [](const RowToSample& row) { return std::log(row.parameters.min_p); });
  left = left.masked_fill(dropped.logical_or(sorted - sorted.narrow(1, 0, 1) < min_p), kNever);
  return at::empty_like(left).scatter_(1, order, left);
}

}  // namespace

std::vector<SampledToken> draw_rows(const Tensor& logits, std::int64_t drawable, std::span<const RowToSample> rows) {
  const auto device = logits.device();
  const auto wide = logits.to(kFloat);
  const auto log_sum = wide.logsumexp(1, /*keepdim=*/true);
  auto scores = wide.narrow(1, 0, drawable);
  if (any(rows, penalizes)) {
    scores = scores.clone();
    penalize(scores, rows);
  }
  auto id = scores.argmax(1, /*keepdim=*/true);
  Tensor log_probability;
  const auto is_greedy =
      column(rows, device, [](const RowToSample& row) { return !draws(row.parameters); }).to(at::kBool);
  if (any(rows, draws)) {
    const auto temperature = column(
        rows, device, [](const RowToSample& row) { return draws(row.parameters) ? row.parameters.temperature : 1; });
    auto kept = scores / temperature.to(kFloat);
    if (any(rows, filters)) kept = filter(kept, rows);
    log_probability = kept.log_softmax(1);
    const auto cumulative = log_probability.exp().cumsum(1, kDouble);
    const auto target = column(rows, device, [](const RowToSample& row) { return row.random; });
    const auto drawn = at::searchsorted(cumulative, target * cumulative.narrow(1, drawable - 1, 1), /*out_int32=*/false,
                                        /*right=*/true);
    id = at::where(is_greedy, id, drawn.clamp_max(drawable - 1));
  }
  const auto of_model = wide.gather(1, id) - log_sum;
  const auto as_drawn =
      log_probability.defined() ? at::where(is_greedy, of_model, log_probability.gather(1, id)) : of_model;
  const auto finite = (log_sum + scores.amax(1, /*keepdim=*/true)).isfinite();  // masked ids are minus infinity
  const auto result =
      at::cat({id.to(kDouble), as_drawn.to(kDouble), of_model.to(kDouble), finite.to(kDouble)}, /*dim=*/1).to(at::kCPU);

  std::vector<SampledToken> tokens;
  const auto values = result.accessor<double, 2>();
  for (std::int64_t row = 0; row < values.size(0); ++row) {
    if (values[row][3] == 0) {
      fail(ExitCode::kNan, "sampling: the model's logits are not finite; its weights are damaged");
    }
    tokens.push_back({.id = static_cast<TokenId>(values[row][0]),
                      .logprob = static_cast<float>(values[row][1]),
                      .model_logprob = static_cast<float>(values[row][2])});
  }
  return tokens;
}

}  // namespace sluice
