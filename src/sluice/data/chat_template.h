// SPDX-License-Identifier: Apache-2.0
// Conversations to text as the model's chat template writes them, and that text to tokens. The template's own markers
// become control tokens; what users wrote stays text, also where it looks like a marker. No text is searched for that:
// each byte of the rendering knows whether template or data wrote it (jinja/text.h).
#pragma once

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/data/jinja/template.h"
#include "sluice/data/tokenizer.h"

namespace sluice {

// A conversation as it comes from a file or a request.
//   messages   array of {"role", "content", ...}. Roles: system, developer (rendered as system), user, assistant, tool.
//              Content: a string, null, or a list of {"type": "text", "text"}; other parts (images) are refused.
//              Further keys: tool_calls, reasoning_content (or reasoning, thinking), name, tool_call_id.
//   tools      array of function descriptions, a string with one in JSON, or null.
//   variables  further variables for the template (`chat_template_kwargs`), an object or null.
struct Chat {
  nlohmann::ordered_json messages;
  nlohmann::ordered_json tools;
  nlohmann::ordered_json variables;
};

struct ChatOptions {
  bool add_generation_prompt = false;                  // end with the header of the assistant's next turn
  std::optional<bool> enable_thinking = std::nullopt;  // absent: the template's own default
};

class ChatTemplate {
 public:
  // The first that exists of: `file`, MODEL/chat_template.jinja, `chat_template` of MODEL/tokenizer_config.json,
  // built_in(). Data error if it does not parse.
  static ChatTemplate load(const std::filesystem::path& model_folder,
                           const std::optional<std::filesystem::path>& file = std::nullopt);

  // Qwen's turn markers, tools and reasoning.
  static ChatTemplate built_in();

  // `special_tokens`: variables such as eos_token, which count as the template's own text.
  ChatTemplate(std::string source, std::string name,
               const std::vector<std::pair<std::string, std::string>>& special_tokens = {});

  // Data error that names the message if the conversation is malformed, or template and line if rendering fails.
  jinja::Output render(const Chat& chat, const ChatOptions& options) const;

  const std::string& name() const { return template_.name(); }

 private:
  jinja::Template template_;
  jinja::Dict special_tokens_;
  bool parse_arguments_ = false;  // a tool call's arguments in a string are parsed: the template wants a mapping
};

// A text with provenance as tokens. `pieces` cut it at its control tokens.
struct EncodedText {
  struct Piece {
    std::size_t begin, end;  // bytes
    std::size_t first_token;
    bool is_control;  // one control token
  };
  std::vector<TokenId> tokens;
  std::vector<Piece> pieces;
  std::int64_t literal_specials = 0;  // places that look like a control token and were left as text
};

// Shared and thread-safe like the tokenizer.
class ChatEncoder {
 public:
  // kLiteral: only the template's own text can become a control token. kControl: any text can.
  ChatEncoder(Tokenizer tokenizer, SpecialTokens special);

  EncodedText encode(const jinja::Text& text) const;

  // The number of tokens that make up the first `byte` bytes of `text`; absent if `byte` falls inside a token, that is,
  // if the ids of that prefix are not a prefix of the ids of the whole.
  std::optional<std::size_t> tokens_before(const jinja::Text& text, const EncodedText& encoded, std::size_t byte) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  std::size_t control_at(const std::string& text, std::size_t byte, TokenId& id) const;

  Tokenizer tokenizer_;
  SpecialTokens special_;
  std::vector<std::pair<std::string, TokenId>> controls_;  // longest first
  std::array<bool, 256> begins_control_{};                 // by first byte
};

}  // namespace sluice
