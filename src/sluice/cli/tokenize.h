// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "sluice/config/app.h"
#include "sluice/train/options.h"

namespace sluice {

// `sluice tokenize --model DIR`: text to ids and back, or samples with what is trained in colour.
struct TokenizeOptions {
  ModelOptions model;
  std::optional<std::string> text;
  std::vector<std::int64_t> ids;
  bool control = false;
  std::optional<std::filesystem::path> data;
  std::int64_t show = 0;
  std::optional<std::filesystem::path> chat_template;
  void describe(OptionList& option) {
    option("model", model, "model");
    option("text", text, "text to turn into ids; without text and ids, each line of standard input");
    option("ids", ids, "ids to turn into text", {.min = 0, .max = std::numeric_limits<TokenId>::max()});
    option("control", control, "text that looks like a control token becomes one; otherwise it stays text");
    option("data", data, "samples, as for sft: prints how many tokens they have", {.input = true});
    option("show", show, "print so many samples of data, trained tokens in colour", {.min = 0});
    option("chat_template", chat_template, "template file instead of the model folder's own", {.input = true});
  }
};

ExitCode run_tokenize(const TokenizeOptions& options, const Invocation& invocation);

}  // namespace sluice
