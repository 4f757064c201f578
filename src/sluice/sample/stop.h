// SPDX-License-Identifier: Apache-2.0
// What ends a sampled sequence besides its length: ids and texts.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/data/tokenizer.h"

namespace sluice {

// Every id that ends an answer: the union of eos_token_id in config.json (its text_config too), eos_token_id in
// generation_config.json and the tokenizer's end token; sorted. Each file may lack it. Data error with file and key for
// a value that is no id or list of ids.
std::vector<TokenId> stop_ids(const std::filesystem::path& model_folder, const std::optional<Tokenizer>& tokenizer);

// Watches a text that comes in pieces for the first of some strings. Text that may be the beginning of one is held back
// until that is decided.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> strings);

  // The text that is released by this piece: all that comes before a stop string and cannot begin one.
  std::string push(std::string_view piece);

  // A stop string is complete. It and what follows it are never released.
  bool found() const { return found_; }

  // The end of the text: what was held back.
  std::string finish();

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool found_ = false;
};

}  // namespace sluice
