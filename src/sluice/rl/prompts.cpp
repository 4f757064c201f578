// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/prompts.h"

#include <span>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/data/chat_template.h"
#include "sluice/data/records.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

// The value of the first of these keys that the record has.
Json first_of(const Json& record, const std::optional<std::string>& key, std::initializer_list<const char*> keys) {
  if (key) return value_or_null(record, key->c_str());
  for (const auto* name : keys) {
    if (auto value = value_or_null(record, name); !value.is_null()) return value;
  }
  return {};
}

class PromptMaker {
 public:
  PromptMaker(const std::filesystem::path& model_folder, const PromptOptions& options)
      : options_(options),
        template_(ChatTemplate::load(model_folder, options.chat_template)),
        encoder_(Tokenizer::load(model_folder), SpecialTokens::kLiteral) {}

  Prompt make(const Record& record) const {
    try {
      Prompt prompt{.tokens = tokens_of(record.json), .record = record.json, .place = record.place};
      if (prompt.tokens.empty()) fail_data("the prompt is empty; an answer needs at least one token before it");
      prompt.text = encoder_.tokenizer().decode(prompt.tokens);
      const auto answer = first_of(record.json, options_.answer_key, {"answer", "label", "ground_truth"});
      if (answer.is_string()) prompt.answer = answer.get<std::string>();
      else if (!answer.is_null()) prompt.answer = answer.dump();
      return prompt;
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", record.place, error.what()));
    }
  }

 private:
  std::vector<TokenId> tokens_of(const Json& record) const {
    auto prompt = first_of(record, options_.prompt_key, {"prompt", "question", "messages"});
    if (prompt.is_string()) {
      if (!options_.chat) return encoder_.tokenizer().encode(prompt.get<std::string>(), SpecialTokens::kLiteral);
      prompt = Json::array({{{"role", "user"}, {"content", prompt}}});
    }
    if (!prompt.is_array()) {
      fail_data("needs a prompt, text or messages, under {}; data.prompt_key names another key",
                options_.prompt_key.value_or("prompt, question or messages"));
    }
    const bool has_system = !prompt.empty() && prompt[0].is_object() && value_or_null(prompt[0], "role") == "system";
    if (options_.system && !has_system) {
      prompt.insert(prompt.begin(), Json{{"role", "system"}, {"content", *options_.system}});
    }
    const Chat chat{prompt, value_or_null(record, "tools"), value_or_null(record, "chat_template_kwargs")};
    const auto rendered = template_.render(chat, {.add_generation_prompt = true, .enable_thinking = options_.thinking});
    return encoder_.encode(rendered.text).tokens;
  }

  const PromptOptions& options_;
  ChatTemplate template_;
  ChatEncoder encoder_;
};

}  // namespace

std::vector<Prompt> load_prompts(const std::filesystem::path& file, const std::filesystem::path& model_folder,
                                 const PromptOptions& options, std::int64_t max_tokens) {
  const PromptMaker maker(model_folder, options);
  std::vector<Prompt> prompts;
  std::int64_t records = 0;
  read_records(file, [&](const Record& record) {
    ++records;
    auto prompt = maker.make(record);
    if (std::ssize(prompt.tokens) <= max_tokens) prompts.push_back(std::move(prompt));
  });
  const auto left_out = records - std::ssize(prompts);
  if (prompts.empty()) {
    fail_data(
        "{}: no prompt to use; {} of {} records are longer than {} tokens, which train.seq_len leaves beside "
        "rollout.max_tokens",
        file.string(), left_out, records, max_tokens);
  }
  log_info("prompts: {} of {}{}", prompts.size(), file.string(),
           left_out > 0 ? fmt::format("; {} left out, longer than {} tokens", left_out, max_tokens) : "");
  return prompts;
}

std::string fingerprint(const std::vector<Prompt>& prompts) {
  std::string sums;
  for (const auto& prompt : prompts) {
    sums += checksum(std::as_bytes(std::span(prompt.tokens))) + checksum(std::as_bytes(std::span(prompt.answer)));
  }
  return checksum(std::as_bytes(std::span(sums)));
}

std::vector<std::size_t> PromptStream::next(std::int64_t count) {
  std::vector<std::size_t> chosen;
  while (std::ssize(chosen) < count) {
    const auto order = shuffled(count_, seed_, static_cast<std::uint64_t>(position_.epoch));
    while (std::ssize(chosen) < count && position_.index < count_) {
      chosen.push_back(static_cast<std::size_t>(order[static_cast<std::size_t>(position_.index++)]));
    }
    if (position_.index == count_) position_ = {.epoch = position_.epoch + 1, .index = 0};
  }
  return chosen;
}

}  // namespace sluice
