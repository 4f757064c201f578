// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/packing.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "sluice/core/error.h"

namespace sluice {
namespace {

// Large enough for best fit to leave little room, small enough that a window of short samples is a small part of an
// epoch.
constexpr std::size_t kWindow = 4096;

// SplitMix64 (Steele, Lea, Flood 2014): the n-th number is a hash of the state and n, so it is the same everywhere.
std::uint64_t split_mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

// Uniform below `bound`, up to 2^-64 * bound.
std::uint64_t below(std::uint64_t bound, std::uint64_t random) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(random) * bound) >> 64);
}

// Fisher and Yates.
template <typename T>
void shuffle(std::vector<T>& values, std::uint64_t state) {
  for (std::size_t i = values.size(); i > 1; --i)
    std::swap(values[i - 1], values[below(i, split_mix(state + i * 0x9E3779B97F4A7C15U))]);
}

}  // namespace

PackedBatch pack(const std::vector<Sample>& dataset, std::span<const std::int64_t> samples) {
  PackedBatch batch;
  batch.cu_seqlens.push_back(0);
  for (const auto place : samples) {
    const auto& sample = dataset[static_cast<std::size_t>(place)];
    const auto size = sample.tokens.size();
    for (std::size_t i = 0; i < size; ++i) {
      const bool has_target = i + 1 < size && sample.loss_mask[i + 1];
      batch.tokens.push_back(sample.tokens[i]);
      batch.targets.push_back(has_target ? sample.tokens[i + 1] : kIgnoredTarget);
      batch.loss_weight.push_back(has_target ? 1.0F : 0.0F);
    }
    batch.cu_seqlens.push_back(static_cast<std::int32_t>(batch.tokens.size()));
    batch.samples.push_back(place);
  }
  return batch;
}

std::vector<std::int64_t> shuffled(std::int64_t count, std::uint64_t seed, std::uint64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  shuffle(order, split_mix(split_mix(seed) + epoch));
  return order;
}

std::vector<std::vector<std::int64_t>> best_fit_packs(std::span<const std::int64_t> order,
                                                      std::span<const std::int64_t> lengths, std::int64_t seq_len) {
  const auto length = [&](std::int64_t sample) { return lengths[static_cast<std::size_t>(sample)]; };
  std::vector<std::vector<std::int64_t>> packs;
  for (std::size_t begin = 0; begin < order.size(); begin += kWindow) {
    const auto window = order.subspan(begin, std::min(kWindow, order.size() - begin));
    std::vector<std::int64_t> longest_first(window.begin(), window.end());
    std::stable_sort(longest_first.begin(), longest_first.end(), [&](auto a, auto b) { return length(a) > length(b); });
    std::set<std::pair<std::int64_t, std::size_t>> room;  // tokens that are free, and in which pack
    for (const auto sample : longest_first) {
      const auto place = room.lower_bound({length(sample), 0});
      std::size_t pack = packs.size();
      std::int64_t left = seq_len;
      if (place == room.end()) {
        packs.emplace_back();
      } else {
        std::tie(left, pack) = *place;
        room.erase(place);
      }
      packs[pack].push_back(sample);
      room.emplace(left - length(sample), pack);
    }
  }
  return packs;
}

void to_json(nlohmann::json& json, const DataPosition& position) {
  json = {{"epoch", position.epoch}, {"index", position.index}};
}

void from_json(const nlohmann::json& json, DataPosition& position) {
  const auto read = [&](const char* key) {
    const auto value = json.is_object() ? json.find(key) : json.end();
    if (!json.is_object() || value == json.end() || !value->is_number_integer() || *value < 0) {
      fail_data("a data position needs {}, an integer of at least 0: {}", key, json.dump());
    }
    return value->get<std::int64_t>();
  };
  position = {read("epoch"), read("index")};
}

BatchStream::BatchStream(const std::vector<Sample>& dataset, const StreamOptions& options)
    : dataset_(dataset), options_(options) {
  if (dataset.empty()) fail_usage("a stream of batches needs at least one sample");
  if (options.seq_len < 1 || options.tokens_per_step < 1) {
    fail_usage("seq_len ({}) and tokens_per_step ({}) must be at least 1", options.seq_len, options.tokens_per_step);
  }
  for (const auto& sample : dataset) {
    lengths_.push_back(std::ssize(sample.tokens));
    if (lengths_.back() > options.seq_len) {
      fail_usage("{}: the sample has {} tokens and seq_len is {}; load the data with max_tokens = seq_len",
                 sample.place, lengths_.back(), options.seq_len);
    }
  }
  packs_ = packs_of(0);
}

BatchStream::Packs BatchStream::packs_of(std::int64_t epoch) const {
  const auto order = shuffled(std::ssize(lengths_), options_.seed, static_cast<std::uint64_t>(epoch));
  if (!options_.packing) {
    Packs packs;
    for (const auto sample : order) packs.push_back({sample});
    return packs;
  }
  auto packs = best_fit_packs(order, lengths_, options_.seq_len);
  // Best fit puts the long sequences first; the steps must not see them in that order.
  shuffle(packs, split_mix(split_mix(options_.seed ^ 0x7061636BU) + static_cast<std::uint64_t>(epoch)));
  return packs;
}

std::size_t BatchStream::step_end(const Packs& packs, std::size_t begin) const {
  std::int64_t tokens = 0;
  auto end = begin;
  for (; end < packs.size(); ++end) {
    std::int64_t size = 0;
    for (const auto sample : packs[end]) size += lengths_[static_cast<std::size_t>(sample)];
    if (end > begin && tokens + size / 2 >= options_.tokens_per_step)
      break;  // without it the step is nearer to its size
    tokens += size;
  }
  return end;
}

std::vector<PackedBatch> BatchStream::next() {
  const auto begin = static_cast<std::size_t>(position_.index);
  const auto end = step_end(packs_, begin);
  std::vector<PackedBatch> step;
  for (auto i = begin; i < end; ++i) step.push_back(pack(dataset_, packs_[i]));
  if (end < packs_.size()) {
    position_.index = static_cast<std::int64_t>(end);
  } else {
    position_ = {position_.epoch + 1, 0};
    packs_ = packs_of(position_.epoch);
  }
  return step;
}

void BatchStream::restore(const DataPosition& position) {
  auto packs = packs_of(position.epoch);
  if (position.epoch < 0 || position.index < 0 || position.index >= std::ssize(packs)) {
    fail_data(
        "cannot go on at pack {} of epoch {}: this dataset has {} packs an epoch. The data, seq_len or packing changed "
        "since the checkpoint",
        position.index, position.epoch, packs.size());
  }
  position_ = position;
  packs_ = std::move(packs);
}

std::int64_t BatchStream::steps_in_epoch(std::int64_t epoch) const {
  const auto packs = packs_of(epoch);
  std::int64_t steps = 0;
  for (std::size_t begin = 0; begin < packs.size(); begin = step_end(packs, begin)) ++steps;
  return steps;
}

}  // namespace sluice
