// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/batch.h"

#include <algorithm>
#include <bit>

namespace sluice {

namespace {

// Every token whose target, or that of the token `ahead` places after it in its sequence, is trained.
template <typename Take>
void for_each_asked(const PackedBatch& packed, std::int32_t ahead, const Take& take) {
  for (std::size_t n = 0; n + 1 < packed.cu_seqlens.size(); ++n) {
    for (auto t = packed.cu_seqlens[n]; t + ahead < packed.cu_seqlens[n + 1]; ++t) {
      if (packed.targets[t + ahead] >= 0) take(t, packed.targets[t + ahead], packed.loss_weight[t + ahead]);
    }
  }
}

template <typename Value>
Tensor there(const std::vector<Value>& values, at::ScalarType type, at::Device device) {
  return at::tensor(values, at::TensorOptions().dtype(type)).to(device, /*non_blocking=*/true);
}

// At least `rows` of them.
void set_asked(Batch& batch, const PackedBatch& packed, std::int32_t ahead, at::Device device, std::int64_t rows = 0) {
  const auto& split = batch.split;
  std::vector<std::int64_t> asked, targets;
  std::vector<float> weights;
  batch.asked_rows.assign(split.rows.size(), 0);
  for_each_asked(packed, ahead, [&](std::int32_t token, std::int32_t target, float weight) {
    auto begin = split.context_first;
    for (std::size_t rank = 0; rank < split.rows.size(); begin += split.rows[rank++]) {
      if (token >= begin && token < begin + split.rows[rank]) ++batch.asked_rows[rank];
    }
    if (token < split.first || token >= split.first + split.count) return;
    asked.push_back(token - split.first);
    targets.push_back(target);
    weights.push_back(weight);
  });
  for (std::int64_t token = 0; std::ssize(asked) < rows; ++token) {
    asked.push_back(token);
    targets.push_back(kIgnoredTarget);
    weights.push_back(0);
  }
  batch.asked = there(asked, kLong, device);
  batch.targets = there(targets, kLong, device);
  batch.loss_weight = there(weights, kFloat, device);
}

// At least `asked` rows of what is asked.
Batch make_batch(const PackedBatch& packed, at::Device device, const Mesh& mesh, std::int64_t asked) {
  std::vector<std::int64_t> lengths;
  for (std::size_t n = 0; n + 1 < packed.cu_seqlens.size(); ++n) {
    lengths.push_back(packed.cu_seqlens[n + 1] - packed.cu_seqlens[n]);
  }
  auto split = split_tokens(lengths, mesh);
  Batch batch{.pack = make_pack(std::move(lengths), {}, {}, device),
              .tokens = there(packed.tokens, kInt, device).to(kLong),
              .split = std::move(split),
              .asked = {},
              .targets = {},
              .loss_weight = {},
              .asked_rows = {}};
  set_asked(batch, packed, /*ahead=*/0, device, asked);
  return batch;
}

// Up by less than an eighth.
std::int64_t rounded(std::int64_t count) {
  const auto step = std::max(std::bit_floor(static_cast<std::uint64_t>(count)) / 8, std::uint64_t{1});
  return (count + static_cast<std::int64_t>(step) - 1) / static_cast<std::int64_t>(step) *
         static_cast<std::int64_t>(step);
}

}  // namespace

Batch to_batch(const PackedBatch& packed, at::Device device, const Mesh& mesh) {
  return make_batch(packed, device, mesh, /*asked=*/0);
}

PackShape filled_shape(const PackedBatch& packed) {
  const auto own = std::ssize(packed.tokens), tokens = rounded(own);
  const auto sequences = packed.cu_seqlens.size() - (tokens > own ? 0 : 1);
  const auto asked = std::ranges::count_if(packed.targets, [](auto target) { return target >= 0; });
  return {.tokens = tokens, .sequences = static_cast<std::int64_t>(std::bit_ceil(sequences)), .asked = rounded(asked)};
}

Batch filled_batch(PackedBatch packed, const PackShape& shape, at::Device device) {
  const auto tokens = static_cast<std::size_t>(shape.tokens);
  for (std::size_t i = 0; packed.tokens.size() < tokens; ++i) packed.tokens.push_back(packed.tokens[i]);
  packed.targets.resize(tokens, kIgnoredTarget);
  packed.loss_weight.resize(tokens, 0);
  packed.cu_seqlens.resize(static_cast<std::size_t>(shape.sequences) + 1, static_cast<std::int32_t>(tokens));
  auto batch = make_batch(packed, device, one_process(), shape.asked);
  batch.pack.lengths.assign(batch.pack.lengths.size(), 0);
  batch.pack.lengths[0] = shape.tokens;
  batch.asked_rows = {shape.asked};
  return batch;
}

Batch next_tokens(const Batch& batch, const PackedBatch& packed) {
  auto next = batch;
  next.tokens = batch.tokens.roll(-1, 0);
  set_asked(next, packed, /*ahead=*/1, batch.tokens.device());
  return next;
}

double next_token_weight(const PackedBatch& packed) {
  double sum = 0;
  for_each_asked(packed, /*ahead=*/1, [&](std::int32_t, std::int32_t, float weight) { sum += weight; });
  return sum;
}

std::int64_t next_tokens_asked(const PackedBatch& packed) {
  std::int64_t count = 0;
  for_each_asked(packed, /*ahead=*/1, [&](std::int32_t, std::int32_t, float) { ++count; });
  return count;
}

}  // namespace sluice
