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

// `sluice generate`: answers of a model. One prompt streams to the terminal; answers to several are printed in order,
// each when it is complete.
struct GenerateOptions {
  ModelOptions model;
  std::optional<std::filesystem::path> adapter;
  std::vector<std::string> prompt;
  std::optional<std::filesystem::path> data;
  bool chat = false;
  std::optional<std::string> system;
  std::optional<bool> thinking;
  std::optional<std::filesystem::path> chat_template;
  std::int64_t max_tokens = 256;
  double temperature = 1;
  double top_p = 1;
  std::int64_t top_k = 0;
  double min_p = 0;
  double repetition_penalty = 1;
  std::int64_t seed = 42;
  std::vector<std::string> stop;
  DeviceChoice device = DeviceChoice::kAuto;
  std::optional<Precision> dtype;
  bool json = false;
  void describe(OptionList& option) {
    option("model", model, "model");
    option("adapter", adapter, "LoRA adapter in PEFT's form that the model is given",
           {.synonyms = {"lora", "peft"}, .input = true});
    option("prompt", prompt, "what to continue", {.repeated = true});
    option("data", data, "JSONL with prompt (a string or messages), messages or tokens in each line", {.input = true});
    option("chat", chat, "a prompt is a user's message, put into the chat template; otherwise plain text");
    option("system", system, "system message before each chat that begins without one");
    option("thinking", thinking, "reasoning before the answer, where the template knows it; none: its default",
           {.synonyms = {"enable_thinking"}});
    option("chat_template", chat_template, "template file instead of the model folder's own", {.input = true});
    option("max_tokens", max_tokens, "most tokens of an answer",
           {.unit = "tokens", .synonyms = {"max_new_tokens"}, .min = 1});
    option("temperature", temperature, "0: the most probable token each time", {.min = 0});
    option("top_p", top_p, "draw from the fewest tokens that have this probability together", {.min = 0, .max = 1});
    option("top_k", top_k, "draw from this many most probable tokens; 0: all", {.min = 0});
    option("min_p", min_p, "draw from tokens with this part of the largest probability", {.min = 0, .max = 1});
    option("repetition_penalty", repetition_penalty, "above 1: tokens already there are less probable", {.min = 0});
    option("seed", seed, "of the draws; the n-th prompt has the n-th stream of it", {.min = 0});
    option("stop", stop, "text that ends an answer; not part of it", {.repeated = true});
    option("device", device, kDeviceSentence, {.choices = {"auto", "cpu", "cuda"}});
    option("dtype", dtype, "dtype of weights and activations; none: bfloat16 on a GPU, float32 on the CPU",
           {.choices = {"float32", "bfloat16"}});
    option("json", json, "one JSON object a line: prompt, text, tokens, logprobs (under the model), finish_reason");
  }
};

ExitCode run_generate(const GenerateOptions& options, const Invocation& invocation);

}  // namespace sluice
