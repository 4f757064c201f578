// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "sluice/config/app.h"

namespace sluice {

// `sluice flops`: the operations that a model needs for a token, by part, forward and in training.
struct FlopsOptions {
  std::string preset;
  std::optional<std::filesystem::path> config;
  std::int64_t seq_len = 4096;
  void describe(OptionList& option) {
    option("preset", preset, "a configuration that comes with the program; `sluice init --preset list` names them");
    option("config", config, "a model's config.json instead", {.input = true});
    option("seq_len", seq_len, "length of the sequences: attention grows with it", {.unit = "tokens", .min = 1});
  }
};

ExitCode run_flops(const FlopsOptions& options, const Invocation& invocation);

}  // namespace sluice
