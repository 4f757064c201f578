// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "sluice/config/app.h"
#include "sluice/train/options.h"

namespace sluice {

// `sluice merge-lora`: a model folder from a model and an adapter in PEFT's form.
struct MergeLoraOptions {
  ModelOptions model;
  std::filesystem::path adapter;
  std::filesystem::path out;
  double max_shard_gb = 5;
  void describe(OptionList& option) {
    option("model", model, "model");
    option("adapter", adapter, "folder of the adapter in PEFT's form", {.required = true, .input = true});
    option("out", out, "folder to make", {.required = true});
    option("max_shard_gb", max_shard_gb, "largest weights file",
           {.unit = "GB", .synonyms = {"max_shard_size"}, .min = 1e-6});
  }
};

ExitCode run_merge_lora(const MergeLoraOptions& options, const Invocation& invocation);

}  // namespace sluice
