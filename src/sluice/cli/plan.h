// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "sluice/config/app.h"
#include "sluice/train/options.h"

namespace sluice {

// `sluice plan`: the memory that training and sampling will take, before anything is loaded; over several processes
// that of the first one.
struct PlanOptions {
  std::filesystem::path folder;
  std::string preset;
  std::optional<std::filesystem::path> config;
  std::int64_t seq_len = DataOptions().seq_len;
  std::int64_t tokens_per_step = TrainOptions().tokens_per_step;
  Precision dtype = PrecisionOptions().dtype;
  std::optional<std::int64_t> lora_rank;
  std::vector<std::string> lora_targets = LoraOptions().targets;
  MtpTraining mtp = MtpTraining::kOff;
  bool recompute = false;
  Offload offload = Offload::kOff;
  std::int64_t sequences = 1;
  std::int64_t gpus = 1;
  ParallelOptions parallel;
  void describe(OptionList& option) {
    option("folder", folder, "model folder; its weights are not read", {.alias = "model", .positional = true});
    option("preset", preset, "a configuration that comes with the program; `sluice init --preset list` names them");
    option("config", config, "a model's config.json instead", {.input = true});
    option("seq_len", seq_len, "tokens of a packed row, and of a sampled sequence", {.unit = "tokens", .min = 2});
    option("tokens_per_step", tokens_per_step, "as train.tokens_per_step of sft", {.unit = "tokens", .min = 1});
    option("dtype", dtype, "as precision.dtype of sft", {.choices = {"float32", "bfloat16"}});
    option("lora_rank", lora_rank, "as lora.rank of sft; none: all parameters are trained", {.min = 1});
    option("lora_targets", lora_targets, "as lora.targets of sft");
    option("mtp", mtp, "as train.mtp of sft", {.choices = {"off", "joint", "only"}});
    option("recompute", recompute, "as mem.recompute of sft");
    option("offload", offload, "as mem.offload of sft", {.choices = {"off", "host", "disk"}});
    option("gpus", gpus, "processes that share the training, each with a GPU of its own", {.min = 1});
    option("parallel", parallel, "how they share it, as of sft");
    option("sequences", sequences, "sequences that are sampled at once", {.min = 1});
  }
};

ExitCode run_plan(const PlanOptions& options, const Invocation& invocation);

}  // namespace sluice
