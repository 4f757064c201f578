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
#include "sluice/data/sample.h"
#include "sluice/train/options.h"

namespace sluice {

// Settings that decide the numbers of a run, by dotted name: all but where it writes, how often it saves and what it
// evaluates. A run may go on only with the same.
nlohmann::json maths_settings(const SftOptions& options);

// Tells samples from others by their tokens and masks, in their order; kept in a checkpoint as "samples".
std::string fingerprint(const std::vector<Sample>& samples);

// Before anything is read: usage error if the folder holds a run and neither resume nor run.overwrite was asked for, or
// both.
void check_run_folder(const SftOptions& options);

// Makes or opens options.run.out and writes config.toml. The state to go on from, where ckpt.resume is auto and there
// is one. Usage error if the samples or settings that decide the numbers differ from the checkpoint's and ckpt.force is
// not given; it lists them.
std::optional<TrainingState> open_run(const SftOptions& options, const std::vector<Sample>& train,
                                      const std::string& resolved_toml);

}  // namespace sluice
