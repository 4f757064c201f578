// SPDX-License-Identifier: Apache-2.0
// What a training run resumes from: RUN/checkpoints/step_N/ with meta.json and one safetensors file for each kind of
// tensor (master weights, optimizer moments). A checkpoint appears by rename, whole; meta.json lists every file with
// its size and checksum. Tensors are global and named as the model's parameters, so any mesh can read what any other
// wrote.
#pragma once

#include <filesystem>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Raised by one when the meaning of the files changes; no other version is read.
inline constexpr int kCheckpointVersion = 1;

struct TrainingState {
  std::int64_t step = 0;                           // optimizer steps done
  nlohmann::json meta = nlohmann::json::object();  // the trainer's own: seed, position in the data, configuration
  std::map<std::string, NamedTensors> tensors;     // by kind, [a-z0-9_]+: "master", "exp_avg", ...
};

// Which checkpoints stay when a new one is there: the newest `keep_last` (0: all), and those whose step is a multiple
// of `keep_every` (0: none).
struct Retention {
  std::int64_t keep_last = 0;
  std::int64_t keep_every = 0;
};

// Saves in the background. Files that a killed process left half written are removed at construction.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::filesystem::path& run, Retention retention);
  ~CheckpointWriter();  // waits; a failure that nobody waited for is logged
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Copies the tensors to CPU memory and returns; they are written while training goes on. Waits for the save before,
  // and fails if that one failed. A checkpoint of the same step is replaced. Afterwards prunes, and points `latest` to
  // the new one.
  void save(const TrainingState& state);

  // The same at once: returns when it is on disk, and copies nothing that lies in CPU memory.
  void save_now(const TrainingState& state);

  // Until the last save is on disk. Fails if it failed.
  void wait();

 private:
  std::filesystem::path run_;
  Retention retention_;
  std::future<void> writing_;
};

// Checkpoints of a run, newest first. Half-written ones have other names and are not among them.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& run);

// The newest checkpoint of a run, if there is one.
std::optional<std::filesystem::path> find_latest(const std::filesystem::path& run);

// Reads one checkpoint. The tensors lie over the mapped files, copy-on-write. Data error if the format version is
// another, or a file is missing, has another size or another checksum.
TrainingState read_checkpoint(const std::filesystem::path& checkpoint);

// For `resume = auto`: the newest checkpoint that is undamaged, with a warning for each that is not; nothing if the run
// has none. Data error if all are damaged or the newest is of another format version.
std::optional<TrainingState> read_latest(const std::filesystem::path& run);

}  // namespace sluice
