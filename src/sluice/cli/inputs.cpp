// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/inputs.h"

#include "sluice/core/error.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"

namespace sluice {
using Json = nlohmann::ordered_json;

std::int64_t vocab_size_of(const std::filesystem::path& model_folder) {
  const auto config = read_model_config(model_folder);
  const auto where = (model_folder / kConfigFile).string();
  return build_model(config, where).decoder->vocab_size();
}

std::vector<TokenId> token_list(const Json& list, std::int64_t vocab_size) {
  if (!list.is_array()) fail_data("tokens must be a list of ids, got {}", list.type_name());
  std::vector<TokenId> ids;
  for (const auto& id : list) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size) {
      fail_data("tokens[{}] must be an id below {}, the model's vocabulary; got {}", ids.size(), vocab_size, id.dump());
    }
    ids.push_back(id.get<TokenId>());
  }
  return ids;
}

const ChatEncoder& InputEncoder::encoder() {
  if (!encoder_) encoder_.emplace(Tokenizer::load(model_folder_), SpecialTokens::kLiteral);
  return *encoder_;
}

std::vector<TokenId> InputEncoder::text(const std::string& text) {
  return tokenizer().encode(text, SpecialTokens::kLiteral);
}

std::vector<TokenId> InputEncoder::conversation(const Json& messages, const Json& record, bool add_generation_prompt) {
  if (!template_) template_ = ChatTemplate::load(model_folder_, chat_template_file_);
  const Chat chat{messages, value_or_null(record, "tools"), value_or_null(record, "chat_template_kwargs")};
  const auto rendered =
      template_->render(chat, {.add_generation_prompt = add_generation_prompt, .enable_thinking = enable_thinking_});
  return encoder().encode(rendered.text).tokens;
}

}  // namespace sluice
