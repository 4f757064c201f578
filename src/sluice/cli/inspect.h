// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "sluice/config/app.h"

namespace sluice {

// `sluice inspect DIR`: what a model folder holds, what each tensor maps to, and what is set aside.
struct InspectOptions {
  std::filesystem::path path;
  bool tensors = true;
  void describe(OptionList& option) {
    option("path", path, "model folder", {.alias = "model", .required = true, .positional = true});
    option("tensors", tensors, "list every tensor; otherwise the summary alone");
  }
};

ExitCode run_inspect(const InspectOptions& options, const Invocation& invocation);

}  // namespace sluice
