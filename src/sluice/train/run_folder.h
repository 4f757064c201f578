// SPDX-License-Identifier: Apache-2.0
// The folder of a training run: config.toml, metrics.jsonl, checkpoints/, export/. Opening one decides whether the run
// begins, goes on, or is refused.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/train/options.h"

namespace sluice {

// Settings that decide the numbers of a run, by dotted name: all but where it writes, how often it saves, what it
// evaluates and which processes share the work. A run may go on only with the same.
nlohmann::json maths_settings(const OptionList& list);

template <typename Options>
nlohmann::json maths_settings(const Options& options) {
  auto copy = options;  // a list is bound to fields that it could change
  return maths_settings(OptionList(copy));
}

// What a run may not change when it goes on; a checkpoint keeps both.
struct RunIdentity {
  nlohmann::json settings;  // maths_settings()
  std::string samples;      // tells the data from other data
};

// Before anything is read: usage error if the folder holds a run and neither resume nor run.overwrite was asked for, or
// both.
void check_run_folder(const RunOptions& run, const CheckpointOptions& ckpt);

// Makes or opens run.out and writes config.toml. The state to go on from, where ckpt.resume is auto and there is one.
// Usage error if `identity` differs from the checkpoint's and ckpt.force is not given; it lists the differences.
std::optional<TrainingState> open_run(const RunOptions& run, const CheckpointOptions& ckpt, const RunIdentity& identity,
                                      const std::string& resolved_toml);

}  // namespace sluice
