// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "sluice/config/app.h"

namespace sluice {

// `sluice complete FOLDER --base DIR --out DIR`: a model folder from one that holds the text model alone, and the
// published one that it came from: names, forms and whatever the first left out (vision tower, multi-token prediction)
// are the base's.
struct CompleteOptions {
  std::filesystem::path folder;
  std::filesystem::path base;
  std::filesystem::path out;
  double max_shard_gb = 5;
  void describe(OptionList& option) {
    option("folder", folder, "the folder that lacks something", {.required = true, .positional = true});
    option("base", base, "the folder that has it all", {.alias = "model", .required = true, .input = true});
    option("out", out, "folder to make", {.required = true});
    option("max_shard_gb", max_shard_gb, "largest weights file",
           {.unit = "GB", .synonyms = {"max_shard_size"}, .min = 1e-6});
  }
};

ExitCode run_complete(const CompleteOptions& options, const Invocation& invocation);

}  // namespace sluice
