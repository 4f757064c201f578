// SPDX-License-Identifier: Apache-2.0
// All samples of some data files, in memory, in the order of the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sluice/data/sample.h"

namespace sluice {

enum class OverLong {
  kTruncate,  // keep the first max_tokens
  kDrop,
  kSplit,  // into pieces of max_tokens; a piece's first token is no target
};

struct DatasetOptions {
  std::int64_t max_tokens = 4096;  // of one sample; at most the stream's seq_len
  OverLong over_long = OverLong::kTruncate;
};

struct DatasetCounts {
  std::int64_t records = 0;
  std::int64_t untrained = 0;         // dropped: no token to train on, in the record or within max_tokens
  std::int64_t over_long = 0;         // longer than max_tokens: truncated, dropped or split
  std::int64_t literal_specials = 0;  // records with text that looks like a control token and was left as text
  std::int64_t samples = 0, tokens = 0, trained_tokens = 0;  // what is left
};

class Dataset {
 public:
  // Data error for a record that cannot be used (SampleMaker::make, read_records), and if no sample is left. What was
  // dropped or cut is logged, with the counts and the reason.
  static Dataset load(const std::vector<std::filesystem::path>& files, const SampleMaker& maker,
                      const DatasetOptions& options);

  const std::vector<Sample>& samples() const { return samples_; }
  const DatasetCounts& counts() const { return counts_; }

  // What load() logs: one line each for the size, dropped, over-long and literal records, as far as there are any.
  std::vector<std::string> summary(const DatasetOptions& options) const;

 private:
  void add(Sample sample);
  std::vector<Sample> samples_;
  DatasetCounts counts_;
};

}  // namespace sluice
