// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "sluice/config/app.h"

namespace sluice {

enum class ExportDtype { kSource, kFp8 };

// `sluice export CHECKPOINT --out DIR`: a model folder from a training checkpoint and the model that the run began
// with, or from another model folder.
struct ExportCommandOptions {
  std::filesystem::path checkpoint;
  std::filesystem::path out;
  std::filesystem::path base;
  ExportDtype dtype = ExportDtype::kSource;
  double max_shard_gb = 5;
  void describe(OptionList& option) {
    option("checkpoint", checkpoint, "RUN/checkpoints/step_N, RUN for its newest one, or a model folder",
           {.required = true, .positional = true});
    option("out", out, "folder to make", {.required = true});
    option("base", base, "model folder that the run began with; empty: the one that the run names",
           {.alias = "model", .input = true});
    option("dtype", dtype,
           "source: as the base has each tensor, its FP8 in bfloat16; fp8: projections in e4m3, a scale for each block "
           "of 128 x 128",
           {.synonyms = {"quantization"}, .choices = {"source", "fp8"}});
    option("max_shard_gb", max_shard_gb, "largest weights file",
           {.unit = "GB", .synonyms = {"max_shard_size"}, .min = 1e-6});
  }
};

ExitCode run_export(const ExportCommandOptions& options, const Invocation& invocation);

}  // namespace sluice
