// SPDX-License-Identifier: Apache-2.0
// What people hand to a model as tokens: texts, conversations and token lists.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sluice/data/chat_template.h"
#include "sluice/data/records.h"

namespace sluice {

// Rows of the embedding of the model in a folder; reads config.json alone.
std::int64_t vocab_size_of(const std::filesystem::path& model_folder);

// The ids in a JSON list. Data error unless each is an id below `vocab_size`.
std::vector<TokenId> token_list(const nlohmann::ordered_json& list, std::int64_t vocab_size);

// Reads tokenizer and chat template when they are first needed: token lists need neither.
class InputEncoder {
 public:
  // `chat_template`: a file instead of the model folder's own.
  InputEncoder(std::filesystem::path model_folder, std::optional<std::filesystem::path> chat_template,
               std::optional<bool> enable_thinking)
      : model_folder_(std::move(model_folder)),
        chat_template_file_(std::move(chat_template)),
        enable_thinking_(enable_thinking) {}

  const Tokenizer& tokenizer() { return encoder().tokenizer(); }

  // Text that looks like a control token stays text.
  std::vector<TokenId> text(const std::string& text);

  // `record`: tools and chat_template_kwargs that go with the messages, if it has them.
  std::vector<TokenId> conversation(const nlohmann::ordered_json& messages, const nlohmann::ordered_json& record,
                                    bool add_generation_prompt);

 private:
  const ChatEncoder& encoder();

  std::filesystem::path model_folder_;
  std::optional<std::filesystem::path> chat_template_file_;
  std::optional<bool> enable_thinking_;
  std::optional<ChatEncoder> encoder_;
  std::optional<ChatTemplate> template_;
};

}  // namespace sluice
