// SPDX-License-Identifier: Apache-2.0
// Supervised fine-tuning: the loop, and what belongs to a step beside the arithmetic.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/core/error.h"
#include "sluice/core/metrics_file.h"
#include "sluice/core/progress.h"
#include "sluice/core/signals.h"
#include "sluice/data/packing.h"
#include "sluice/models/family.h"
#include "sluice/train/adamw.h"
#include "sluice/train/options.h"
#include "sluice/train/recorded_packs.h"
#include "sluice/train/setup.h"
#include "sluice/train/step.h"

namespace sluice {

class SftTrainer {
 public:
  // The model's parameters must be loaded; model and samples must outlive the trainer. `eval` may be empty.
  // `state`: the checkpoint to go on from (train/run_folder.h). `peak`: operations a second of the device, if known.
  // The ranks of the decoder's mesh make and run it together, with the same arguments.
  SftTrainer(const SftOptions& options, Model& model, const std::vector<Sample>& train, const std::vector<Sample>& eval,
             const std::optional<TrainingState>& state, std::optional<double> peak,
             const std::optional<TrainedAdapters>& adapters);

  // To the last step, or to the end of the step in which a signal asks to stop. A checkpoint stands at the end of both.
  // kRequeue after a signal.
  ExitCode run();

  std::int64_t total_steps() const { return schedule_.total_steps; }

 private:
  void finish_step(std::int64_t step, double lr, const StepStats& stats, double operations, double step_s);
  void save(std::int64_t step, bool last);
  void prepare_recording();

  bool stop_wanted(const StopSignals& signals) const;

  const SftOptions& options_;
  const Mesh& mesh_;
  nlohmann::json adapters_;  // what a checkpoint says of them; null: the model is trained
  Objective objective_;
  std::string samples_;  // fingerprint of those that are trained on
  std::vector<PackedBatch> eval_;
  BatchStream batches_;
  std::vector<Parameter*> parameters_;
  GradientSum gradients_;
  AdamW optimizer_;
  std::optional<RecordedPacks> recorded_;  // none: packs are not recorded
  Schedule schedule_;
  std::int64_t first_step_;
  std::int64_t trained_tokens_ = 0;  // since the run began
  std::optional<double> peak_;
  std::optional<MetricsFile> metrics_;  // of rank 0
  CheckpointWriter checkpoints_;
  Progress progress_;
  std::chrono::steady_clock::time_point begin_;  // of the first step in this process
};

}  // namespace sluice
