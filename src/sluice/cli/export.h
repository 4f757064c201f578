// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "sluice/config/app.h"

namespace sluice {

// `sluice export CHECKPOINT --out DIR`: a model folder from a training checkpoint and the model that the run began
// with.
struct ExportCommandOptions {
  std::filesystem::path checkpoint;
  std::filesystem::path out;
  std::filesystem::path base;
  double max_shard_gb = 5;
  void describe(OptionList& option) {
    option("checkpoint", checkpoint, "RUN/checkpoints/step_N, or RUN for its newest one",
           {.required = true, .positional = true});
    option("out", out, "folder to make", {.required = true});
    option("base", base, "model folder that the run began with; empty: the one that the run names", {.alias = "model"});
    option("max_shard_gb", max_shard_gb, "largest weights file",
           {.unit = "GB", .synonyms = {"max_shard_size"}, .min = 1e-6});
  }
};

ExitCode run_export(const ExportCommandOptions& options, const Invocation& invocation);

}  // namespace sluice
