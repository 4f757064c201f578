// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/tokenize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <iostream>
#include <limits>

#include "sluice/core/error.h"
#include "sluice/core/terminal.h"
#include "sluice/data/dataset.h"
#include "sluice/formats/model_folder.h"

namespace sluice {
namespace {

void print_ids(const Tokenizer& tokenizer, std::string_view text, SpecialTokens special) {
  fmt::print("{}\n", fmt::join(tokenizer.encode(text, special), " "));
}

void print_samples(const TokenizeOptions& options, const Tokenizer& tokenizer, SpecialTokens special) {
  const SampleMaker maker(tokenizer, ChatTemplate::load(options.model.path, options.chat_template),
                          {.loss_on = LossOn::kAssistant, .special = special, .enable_thinking = {}});
  const auto dataset =
      Dataset::load({*options.data}, maker, {.max_tokens = std::numeric_limits<std::int64_t>::max(), .over_long = {}});
  const auto shown = std::min(options.show, static_cast<std::int64_t>(dataset.samples().size()));
  for (std::int64_t i = 0; i < shown; ++i) {
    const auto& sample = dataset.samples()[static_cast<std::size_t>(i)];
    fmt::print("{}: {} tokens, {} trained\n{}\n", sample.place, sample.tokens.size(), sample.trained_tokens(),
               show_sample(sample, tokenizer, colours_wanted(STDOUT_FILENO)));
  }
  const auto& counts = dataset.counts();
  fmt::print("{} samples, {} tokens, {} trained\n", counts.samples, counts.tokens, counts.trained_tokens);
}

}  // namespace

ExitCode run_tokenize(const TokenizeOptions& options, const Invocation&) {
  const auto& folder = options.model.path;
  if (!std::filesystem::exists(folder / "tokenizer.json")) {
    const auto advice = advice_about(folder);
    if (!advice.empty()) fail_data("{}: no tokenizer.json in this folder. {}", folder.string(), advice);
  }
  const auto tokenizer = Tokenizer::load(folder);
  const auto special = options.control ? SpecialTokens::kControl : SpecialTokens::kLiteral;
  if (options.data) {
    print_samples(options, tokenizer, special);
  } else if (!options.ids.empty()) {
    const std::vector<TokenId> ids(options.ids.begin(), options.ids.end());
    fmt::print("{}\n", tokenizer.decode(ids));
  } else if (options.text) {
    print_ids(tokenizer, *options.text, special);
  } else {
    for (std::string line; std::getline(std::cin, line);) print_ids(tokenizer, line, special);
  }
  return ExitCode::kDone;
}

}  // namespace sluice
