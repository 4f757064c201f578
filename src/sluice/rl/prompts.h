// SPDX-License-Identifier: Apache-2.0
// The questions of a run: prompts as tokens, with what their answers are judged by.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/data/packing.h"
#include "sluice/data/tokenizer.h"
#include "sluice/rl/options.h"

namespace sluice {

struct Prompt {
  std::vector<TokenId> tokens;    // with the header of the assistant's turn
  std::string text = {};          // those tokens as text
  std::string answer = {};        // empty: the record has none
  nlohmann::ordered_json record;  // as it stands in the file
  std::string place;              // "prompts.jsonl:17"
};

// The prompts of a file, in its order. Data error for a record without a prompt and if none is left. Those longer than
// `max_tokens` are left out and counted in the log.
std::vector<Prompt> load_prompts(const std::filesystem::path& file, const std::filesystem::path& model_folder,
                                 const PromptOptions& options, std::int64_t max_tokens);

// Tells prompts from others by tokens and answers, in their order.
std::string fingerprint(const std::vector<Prompt>& prompts);

// Prompts one after the other, in an order that depends on seed and epoch alone; endless.
class PromptStream {
 public:
  PromptStream(std::size_t prompts, std::uint64_t seed) : count_(static_cast<std::int64_t>(prompts)), seed_(seed) {}

  std::vector<std::size_t> next(std::int64_t count);

  DataPosition position() const { return position_; }
  void restore(const DataPosition& position) { position_ = position; }

 private:
  std::int64_t count_;
  std::uint64_t seed_;
  DataPosition position_;
};

}  // namespace sluice
