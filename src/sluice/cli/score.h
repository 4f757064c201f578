// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "sluice/config/app.h"
#include "sluice/train/options.h"

namespace sluice {

// `sluice score`: the log-probability of every token of given sequences. A line in holds `messages`, `text` or
// `tokens`; its line out holds `tokens` and `logprobs`, of each token given those before it, the first one null.
struct ScoreOptions {
  ModelOptions model;
  std::optional<std::filesystem::path> adapter;
  std::filesystem::path data;
  std::filesystem::path out;
  DeviceChoice device = DeviceChoice::kAuto;
  std::optional<Precision> dtype;
  std::optional<std::filesystem::path> chat_template;
  void describe(OptionList& option) {
    option("model", model, "model");
    option("adapter", adapter, "LoRA adapter in PEFT's form that the model is given",
           {.synonyms = {"lora", "peft"}, .input = true});
    option("data", data, "JSONL with messages, text or tokens in each line", {.required = true, .input = true});
    option("out", out, "JSONL to write, lines as in data; a file that is there already is refused", {.required = true});
    option("device", device, kDeviceSentence, {.choices = {"auto", "cpu", "cuda"}});
    option("dtype", dtype, "dtype of weights and activations; none: bfloat16 on a GPU, float32 on the CPU",
           {.choices = {"float32", "bfloat16"}});
    option("chat_template", chat_template, "template file instead of the model folder's own", {.input = true});
  }
};

ExitCode run_score(const ScoreOptions& options, const Invocation& invocation);

}  // namespace sluice
