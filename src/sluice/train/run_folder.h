// SPDX-License-Identifier: Apache-2.0
// The folder of a training run: config.toml, metrics.jsonl, checkpoints/, export/. Opening one decides whether the run
// begins, goes on, or is refused.
#pragma once

#include <filesystem>
#include <memory>
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

// A run folder in which nobody else writes, until this object dies or its process ends, in whatever way. It is an flock
// on the file `.lock` there, which stays. Where the file system has no locks, a warning says so.
class RunLock {
 public:
  // Usage error, which names the holder, if the folder is locked already.
  explicit RunLock(const std::filesystem::path& out);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int descriptor_;
};

struct OpenRun {
  std::unique_ptr<RunLock> lock;       // rank 0's, the one that makes and removes what lies in the folder
  std::optional<TrainingState> state;  // to go on from, where ckpt.resume is auto and there is one; of every rank
};

// Makes or opens run.out and writes config.toml. All ranks of the mesh call it; rank 0 alone looks into the folder and
// writes there, and tells the others which checkpoint it took. Usage error if another run writes there, if the folder
// is refused as by check_run_folder(), and if `identity` differs from the checkpoint's and ckpt.force is not given; it
// lists the differences.
OpenRun open_run(const RunOptions& run, const CheckpointOptions& ckpt, const RunIdentity& identity,
                 const std::string& resolved_toml, const Mesh& mesh = one_process());

}  // namespace sluice
