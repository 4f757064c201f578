// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "sluice/config/app.h"

namespace sluice {

// `sluice slice FOLDER --layers N --out DIR`: a model folder of the first N layers, to try things on. On request of the
// first experts of each, and with a small n-gram table of random rows.
struct SliceOptions {
  std::filesystem::path folder;
  std::filesystem::path out;
  std::int64_t layers = 4;
  std::optional<std::int64_t> experts;
  std::optional<std::int64_t> ngram_vocab_size_base;
  std::int64_t seed = 42;
  double max_shard_gb = 5;
  void describe(OptionList& option) {
    option("folder", folder, "model folder in Hugging Face form", {.required = true, .positional = true});
    option("out", out, "folder to make", {.required = true});
    option("layers", layers, "how many of the first layers to keep", {.synonyms = {"num_hidden_layers"}, .min = 1});
    option("experts", experts, "how many of each layer's first experts to keep; none: all",
           {.synonyms = {"num_experts"}, .min = 1});
    option("ngram_vocab_size_base", ngram_vocab_size_base,
           "draw n-gram tables of about this many rows a head, instead of keeping the model's; none: keep them",
           {.unit = "rows", .min = 1});
    option("seed", seed, "seed of the tables that are drawn", {.min = 0});
    option("max_shard_gb", max_shard_gb, "largest weights file",
           {.unit = "GB", .synonyms = {"max_shard_size"}, .min = 1e-6});
  }
};

ExitCode run_slice(const SliceOptions& options, const Invocation& invocation);

}  // namespace sluice
