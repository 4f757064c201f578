// SPDX-License-Identifier: Apache-2.0
// The samples of supervised fine-tuning: those to train on, and those to evaluate on.
#pragma once

#include <cstdint>
#include <vector>

#include "sluice/data/sample.h"
#include "sluice/train/options.h"

namespace sluice {

struct SftData {
  std::vector<Sample> train;
  std::vector<Sample> eval;  // of eval.data, or the part eval.split of data.path, picked by the seed; or empty
};

// Data error for what Dataset::load refuses, for a token outside the model's `vocab_size`, which names the sample, and
// where one sample would have to be split.
SftData load_sft_data(const SftOptions& options, std::int64_t vocab_size);

}  // namespace sluice
