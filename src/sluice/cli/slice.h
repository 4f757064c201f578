// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "sluice/config/app.h"

namespace sluice {

// `sluice slice FOLDER --layers N --out DIR`: a model folder of the first N layers, to try things on.
struct SliceOptions {
  std::filesystem::path folder;
  std::filesystem::path out;
  std::int64_t layers = 4;
  double max_shard_gb = 5;
  void describe(OptionList& option) {
    option("folder", folder, "model folder in Hugging Face form", {.required = true, .positional = true});
    option("out", out, "folder to make", {.required = true});
    option("layers", layers, "how many of the first layers to keep", {.synonyms = {"num_hidden_layers"}, .min = 1});
    option("max_shard_gb", max_shard_gb, "largest weights file",
           {.unit = "GB", .synonyms = {"max_shard_size"}, .min = 1e-6});
  }
};

ExitCode run_slice(const SliceOptions& options, const Invocation& invocation);

}  // namespace sluice
