// SPDX-License-Identifier: Apache-2.0
// From samples to the batches of an optimizer step. A pack is a row of up to seq_len tokens that holds whole sequences
// one after the other; nothing is padded. The order depends on seed and epoch alone, not on the number of ranks.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "sluice/data/sample.h"

namespace sluice {

constexpr std::int32_t kIgnoredTarget = -100;

// T tokens, S sequences.
struct PackedBatch {
  std::vector<TokenId> tokens;           // [T]
  std::vector<std::int32_t> cu_seqlens;  // [S + 1] first 0, last T
  std::vector<std::int32_t> targets;  // [T] the next token of the sequence; -100: there is none, or it is not trained
  std::vector<float> loss_weight;     // [T] 1 where there is a target, otherwise 0
  std::vector<std::int64_t> samples;  // [S] places in the dataset
};

PackedBatch pack(const std::vector<Sample>& dataset, std::span<const std::int64_t> samples);

// A permutation of 0..count-1 that depends on its arguments alone: the same on every machine and compiler.
std::vector<std::int64_t> shuffled(std::int64_t count, std::uint64_t seed, std::uint64_t epoch);

// Cuts `order` into packs of at most seq_len tokens, best fit decreasing: the longest sequence first, each into the
// fullest pack that still has room. Works through windows of the order, so that packs mix what the shuffle mixed.
// lengths: tokens of each sample, none above seq_len.
std::vector<std::vector<std::int64_t>> best_fit_packs(std::span<const std::int64_t> order,
                                                      std::span<const std::int64_t> lengths, std::int64_t seq_len);

// Where a stream stands: `index` packs of `epoch` were given out.
struct DataPosition {
  std::int64_t epoch = 0, index = 0;
  bool operator==(const DataPosition&) const = default;
};
void to_json(nlohmann::json& json, const DataPosition& position);
void from_json(const nlohmann::json& json, DataPosition& position);  // data error if it is none

struct StreamOptions {
  std::int64_t seq_len = 4096;           // most tokens of a pack
  std::int64_t tokens_per_step = 65536;  // of all packs of an optimizer step together, as nearly as whole packs allow
  std::uint64_t seed = 42;
  bool packing = true;  // false: one sequence a pack
};

// The packs of step after step, endlessly. A step never reaches into the next epoch: the last one of an epoch may be
// smaller.
class BatchStream {
 public:
  // `dataset` must outlive the stream. Usage error if a sample is longer than seq_len or an option is out of range.
  BatchStream(const std::vector<Sample>& dataset, const StreamOptions& options);

  std::vector<PackedBatch> next();  // the micro-batches of one optimizer step, at least one

  // The stream goes on exactly as the one did that gave the position. Data error if the dataset or the options are
  // others, as far as the position shows it.
  DataPosition position() const { return position_; }
  void restore(const DataPosition& position);

  std::int64_t steps_in_epoch(std::int64_t epoch) const;

 private:
  using Packs = std::vector<std::vector<std::int64_t>>;
  Packs packs_of(std::int64_t epoch) const;
  std::size_t step_end(const Packs& packs, std::size_t begin) const;  // packs of the step that starts with `begin`

  const std::vector<Sample>& dataset_;
  StreamOptions options_;
  std::vector<std::int64_t> lengths_;
  DataPosition position_;
  Packs packs_;  // of position_.epoch
};

}  // namespace sluice
