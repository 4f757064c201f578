// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/device_sampler.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "sluice/core/error.h"
#include "sluice/kernels/draw_tokens/draw_tokens.h"

namespace sluice {
namespace {

template <typename Values>
Tensor on_device(const Values& values, at::ScalarType type, at::Device device) {
  return at::tensor(values, type).to(device, /*non_blocking=*/true);
}

// [n, drawable] bool: ids that a row's sequence holds. None where no row has a penalty.
std::optional<Tensor> seen_of(std::span<const RowToSample> rows, std::int64_t drawable, at::Device device) {
  const auto penalizes = [](const RowToSample& row) { return row.parameters.repetition_penalty != 1; };
  if (std::ranges::none_of(rows, penalizes)) return std::nullopt;
  std::vector<std::int64_t> places;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (!penalizes(rows[row])) continue;
    for (const auto id : rows[row].seen) {
      if (id < drawable) places.push_back(static_cast<std::int64_t>(row) * drawable + id);
    }
  }
  const auto count = static_cast<std::int64_t>(rows.size());
  return at::zeros({count * drawable}, at::TensorOptions(device).dtype(at::kBool))
      .index_fill_(0, on_device(places, kLong, device), true)
      .view({count, drawable});
}

Tensor settings_of(std::span<const RowToSample> rows, at::Device device) {
  std::vector<double> settings;  // in the order of DrawSettings
  for (const auto& row : rows) {
    const auto& p = row.parameters;
    settings.insert(settings.end(),
                    {p.temperature, static_cast<double>(p.top_k), p.top_p, p.min_p, p.repetition_penalty, row.random});
  }
  return on_device(settings, kDouble, device).view({static_cast<std::int64_t>(rows.size()), kDrawSettings});
}

}  // namespace

std::vector<SampledToken> draw_rows(const Tensor& logits, std::int64_t drawable, std::span<const RowToSample> rows) {
  const auto device = logits.device();
  const auto drawn =
      draw_tokens(logits, drawable, settings_of(rows, device), seen_of(rows, drawable, device)).to(at::kCPU);
  const std::span all(static_cast<const DrawnToken*>(drawn.const_data_ptr()), rows.size());
  std::vector<SampledToken> tokens;
  for (const auto& token : all) {
    if (std::isnan(token.model_logprob)) {
      fail(ExitCode::kNan, "sampling: the model's logits are not finite; its weights are damaged");
    }
    tokens.push_back({.id = static_cast<TokenId>(token.id),
                      .logprob = static_cast<float>(token.logprob),
                      .model_logprob = static_cast<float>(token.model_logprob)});
  }
  return tokens;
}

}  // namespace sluice
