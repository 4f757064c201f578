// SPDX-License-Identifier: Apache-2.0
// Options of every kind, as the tests of this folder use them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "sluice/core/options.h"

namespace sluice {

enum class ExampleSchedule { kConstant, kCosine, kLinear };

struct ExampleOptim {
  double lr = 1e-5;
  ExampleSchedule schedule = ExampleSchedule::kCosine;
  std::vector<double> betas{0.9, 0.95};
  std::optional<double> clip_norm = 1.0;
  std::int64_t warmup_steps = 0;
  void describe(OptionList& option) {
    option("lr", lr, "peak learning rate", {.synonyms = {"learning_rate"}, .min = 0});
    option("schedule", schedule, "shape of the learning rate",
           {.synonyms = {"lr_scheduler_type"}, .choices = {"constant", "cosine", "linear"}});
    option("betas", betas, "decay of the first and second moment", {.min = 0, .max = 1});
    option("clip_norm", clip_norm, "largest norm of the gradient", {.synonyms = {"max_grad_norm"}, .min = 0});
    option("warmup_steps", warmup_steps, "from 0 to the peak", {.unit = "steps", .min = 0});
  }
};

struct ExampleSource {
  std::filesystem::path path;
  double weight = 1;
  void describe(OptionList& option) {
    option("path", path, "JSONL file", {.required = true});
    option("weight", weight, "share of the samples", {.min = 0});
  }
};

struct ExampleData {
  bool packing = true;
  std::vector<ExampleSource> sources;
  std::optional<std::string> template_name;
  void describe(OptionList& option) {
    option("packing", packing, "several samples in one sequence", {.synonyms = {"sample_packing"}});
    option("sources", sources, "where samples come from");
    option("template_name", template_name, "chat template");
  }
};

struct ExampleModel {
  std::filesystem::path path;
  void describe(OptionList& option) {
    option("path", path, "Hugging Face folder",
           {.synonyms = {"model_name_or_path", "base_model"}, .alias = "model", .required = true});
  }
};

struct ExampleOptions {
  std::int64_t seed = 42;
  std::vector<std::string> tags;
  ExampleModel model;
  ExampleOptim optim;
  ExampleData data;
  void describe(OptionList& option) {
    option("model", model, "the model");
    option("optim", optim, "optimizer");
    option("data", data, "training data");
    option("seed", seed, "of all random numbers");
    option("tags", tags, "words for the run's record");
  }
};

}  // namespace sluice
