// SPDX-License-Identifier: Apache-2.0
// What a training run resumes from: RUN/checkpoints/step_N/ with meta.json and, from each rank, one safetensors file
// for each kind of tensor (master weights, optimizer moments). A checkpoint appears by rename, whole; meta.json lists
// every file with its size and checksum. Tensors are named as the model's parameters and lie in parts that say where in
// the whole they belong, so any mesh can read what any other wrote.
#pragma once

#include <filesystem>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sluice/checkpoint/tensor_parts.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

// Raised by one when the meaning of the files changes; no other version is read.
inline constexpr int kCheckpointVersion = 2;

struct TrainingState {
  std::int64_t step = 0;                           // optimizer steps done
  nlohmann::json meta = nlohmann::json::object();  // the trainer's own: seed, position in the data, configuration
  std::map<std::string, std::vector<TensorParts>> tensors;  // by kind, [a-z0-9_]+: "master", "exp_avg", ...
};

// Which checkpoints stay when a new one is there: the newest `keep_last` (0: all), and those whose step is a multiple
// of `keep_every` (0: none).
struct Retention {
  std::int64_t keep_last = 0;
  std::int64_t keep_every = 0;
};

// Saves in the background. Files that a killed process left half written are removed at construction. The ranks of a
// mesh make the same calls and write into one checkpoint, each what it has; rank 0 puts it in place when all have
// written. Where one cannot, all fail, and nothing is put in place.
class CheckpointWriter {
 public:
  // The mesh must outlive it.
  CheckpointWriter(const std::filesystem::path& run, Retention retention, const Mesh& mesh = one_process());
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
  // What a save needs to know beside the state.
  struct Save {
    std::filesystem::path run;
    Retention retention;
    const World* processes;  // none: one
    std::int64_t number;     // of this run's saves
  };
  Save next_save();
  static void write(const TrainingState& state, const Save& save);

  std::filesystem::path run_;
  Retention retention_;
  const Mesh& mesh_;
  std::int64_t saves_ = 0;
  std::future<void> writing_;
};

// Checkpoints of a run, newest first. Half-written ones have other names and are not among them.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& run);

// The newest checkpoint of a run, if there is one.
std::optional<std::filesystem::path> find_latest(const std::filesystem::path& run);

// Reads one checkpoint. The tensors lie over the mapped files, copy-on-write. Data error if the format version is
// another, or a file is missing, has another size or another checksum.
TrainingState read_checkpoint(const std::filesystem::path& checkpoint);

// The same of step N of a run, by a rank whose rank 0 has read it: its sizes and checksums are not looked at again.
TrainingState read_checked_checkpoint(const std::filesystem::path& run, std::int64_t step);

// For `resume = auto`: the newest checkpoint that is undamaged, with a warning for each that is not; nothing if the run
// has none. Data error if all are damaged or the newest is of another format version.
std::optional<TrainingState> read_latest(const std::filesystem::path& run);

}  // namespace sluice
