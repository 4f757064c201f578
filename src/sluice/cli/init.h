// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "sluice/config/app.h"

namespace sluice {

// `sluice init`: a model folder with random weights, drawn as the family's reference draws them.
struct InitOptions {
  std::string preset;
  std::optional<std::filesystem::path> config;
  std::optional<std::filesystem::path> tokenizer;
  std::filesystem::path out;
  std::int64_t seed = 42;
  bool mtp = false;
  void describe(OptionList& option) {
    option("preset", preset, "a configuration that comes with the program; `sluice init --preset list` names them");
    option("config", config, "a config.json to follow instead", {.input = true});
    option("tokenizer", tokenizer, "folder whose tokenizer and chat template files are copied along", {.input = true});
    option("out", out, "folder to make");
    option("seed", seed, "seed of the weights", {.min = 0});
    option("mtp", mtp, "with a multi-token prediction block");
  }
};

ExitCode run_init(const InitOptions& options, const Invocation& invocation);

}  // namespace sluice
