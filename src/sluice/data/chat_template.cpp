// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/chat_template.h"

#include <algorithm>
#include <array>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{64} << 20;

constexpr const char* kBuiltIn = R"jinja(
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n' ~ system ~ ('\n\n' if system else '') }}
    {{- 'You can call these functions, each described by JSON in a line:\n<tools>\n' }}
    {%- for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}
    {{- '</tools>\nTo call one, answer with its name and arguments:\n' }}
    {{- '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_user and (reasoning or enable_thinking is false) %}
            {{- '<think>\n' ~ reasoning.strip('\n') ~ '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": ' ~ (call.name | tojson) ~ ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif message.role == 'user' or not loop.first or not tools %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' ~ ('<think>\n\n</think>\n\n' if enable_thinking is false else '') }}
{%- endif %})jinja";

// A string, or the text parts of a list one after the other.
std::string content_text(const Json& content, std::size_t place) {
  if (content.is_null()) return {};
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array())
    fail_data("messages[{}].content must be a string or a list of text parts, got {}", place, content.type_name());
  std::string text;
  for (std::size_t i = 0; i < content.size(); ++i) {
    const auto& part = content[i];
    const auto type =
        part.is_object() && part.contains("type") && part["type"].is_string() ? part["type"].get<std::string>() : "";
    if (type != "text" || !part.contains("text") || !part["text"].is_string()) {
      fail_data(
          "messages[{}].content[{}] must be {{\"type\": \"text\", \"text\": ...}}, got {}; images and other media are "
          "not supported",
          place, i, type.empty() ? std::string(part.type_name()) + " without a type" : "type \"" + type + "\"");
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

void check_tool_calls(Json& message, std::size_t place, bool parse_arguments) {
  auto calls = message.find("tool_calls");
  if (calls == message.end() || calls->is_null()) return;
  if (!calls->is_array()) fail_data("messages[{}].tool_calls must be a list, got {}", place, calls->type_name());
  for (std::size_t i = 0; i < calls->size(); ++i) {
    auto& call = (*calls)[i];
    auto* function = call.is_object() && call.contains("function") ? &call["function"] : &call;
    if (!function->is_object() || !function->contains("name") || !(*function)["name"].is_string()) {
      fail_data("messages[{}].tool_calls[{}] must hold a function with a name", place, i);
    }
    const auto arguments = function->find("arguments");
    if (arguments == function->end()) fail_data("messages[{}].tool_calls[{}] has no arguments", place, i);
    if (!arguments->is_string() && !arguments->is_object()) {
      fail_data("messages[{}].tool_calls[{}]: arguments must be an object or a string, got {}", place, i,
                arguments->type_name());
    }
    if (arguments->is_string() && parse_arguments) {
      auto parsed = Json::parse(arguments->get_ref<const std::string&>(), nullptr, false);
      if (!parsed.is_object()) {
        fail_data(
            "messages[{}].tool_calls[{}]: arguments must be a JSON object: the chat template writes them one by one",
            place, i);
      }
      *arguments = std::move(parsed);
    }
  }
}

jinja::Value message_value(const Json& given, std::size_t place, bool parse_arguments) {
  static constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};
  if (!given.is_object()) fail_data("messages[{}] must be an object, got {}", place, given.type_name());
  const auto role = given.find("role");
  if (role == given.end() || !role->is_string()) fail_data("messages[{}] has no role", place);
  const auto& name = role->get_ref<const std::string&>();
  if (std::find(kRoles.begin(), kRoles.end(), name) == kRoles.end()) {
    fail_data("messages[{}]: role \"{}\" is unknown; expected system, developer, user, assistant or tool", place, name);
  }
  auto message = given;
  if (name == "developer") message["role"] = "system";
  const bool may_lack_content = name == "assistant";
  if (!may_lack_content && (!given.contains("content") || given["content"].is_null()))
    fail_data("messages[{}] ({}) has no content", place, name);
  message["content"] = content_text(given.contains("content") ? given["content"] : Json(), place);
  for (const auto* key : {"reasoning_content", "thinking", "reasoning"}) {  // in this order, as transformers reads them
    const auto reasoning = given.find(key);
    if (reasoning == given.end() || reasoning->is_null()) continue;
    if (!reasoning->is_string())
      fail_data("messages[{}].{} must be a string, got {}", place, key, reasoning->type_name());
    if (!message.contains("thinking")) message["thinking"] = *reasoning;
    message["reasoning_content"] = *reasoning;
    break;
  }
  check_tool_calls(message, place, parse_arguments);
  auto value = jinja::from_json(message);
  jinja::Dict tagged = *value.dict();
  tagged.message = static_cast<int>(place);
  return tagged;
}

Json tool_list(const Json& tools) {
  const auto parsed = tools.is_string() ? Json::parse(tools.get_ref<const std::string&>(), nullptr, false) : tools;
  const bool is_list =
      parsed.is_array() && std::all_of(parsed.begin(), parsed.end(), [](const Json& tool) { return tool.is_object(); });
  if (!parsed.is_null() && !is_list) fail_data("tools must be a list of objects, or a string with such a list in JSON");
  return parsed;
}

// bos_token, eos_token and the like of a tokenizer_config.json; each is a string or {"content": string}.
std::vector<std::pair<std::string, std::string>> special_tokens_of(const Json& config) {
  std::vector<std::pair<std::string, std::string>> tokens;
  for (const auto* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const auto token = config.find(name);
    if (token == config.end()) continue;
    if (token->is_string()) tokens.emplace_back(name, token->get<std::string>());
    if (token->is_object() && token->contains("content") && (*token)["content"].is_string()) {
      tokens.emplace_back(name, (*token)["content"].get<std::string>());
    }
  }
  return tokens;
}

// The template in tokenizer_config.json: a string, or a list of named ones of which "default" counts.
std::optional<std::string> template_of(const Json& config, const fs::path& path) {
  const auto given = config.find("chat_template");
  if (given == config.end() || given->is_null()) return std::nullopt;
  if (given->is_string()) return given->get<std::string>();
  if (given->is_array()) {
    for (const auto& named : *given) {
      if (named.is_object() && named.value("name", "") == "default" && named.contains("template") &&
          named["template"].is_string()) {
        return named["template"].get<std::string>();
      }
    }
  }
  fail_data("{}: chat_template must be a string, or a list with one named \"default\"", path.string());
}

}  // namespace

ChatTemplate ChatTemplate::load(const fs::path& model_folder, const std::optional<fs::path>& file) {
  const auto config_path = model_folder / "tokenizer_config.json";
  Json config = Json::object();
  if (fs::exists(config_path)) {
    config = Json::parse(read_file(config_path, kMaxConfigBytes), nullptr, false);
    if (!config.is_object()) fail_data("{}: expected a JSON object", config_path.string());
  }
  const auto special_tokens = special_tokens_of(config);
  const auto own_file = model_folder / "chat_template.jinja";
  if (file || fs::exists(own_file)) {
    const auto path = file.value_or(own_file);
    return {read_file(path, kMaxConfigBytes), path.string(), special_tokens};
  }
  if (auto source = template_of(config, config_path))
    return {std::move(*source), config_path.string() + " chat_template", special_tokens};
  return built_in();
}

ChatTemplate ChatTemplate::built_in() { return {kBuiltIn, "built-in chat template"}; }

ChatTemplate::ChatTemplate(std::string source, std::string name,
                           const std::vector<std::pair<std::string, std::string>>& special_tokens)
    : template_(std::move(source), std::move(name)) {
  for (const auto& [key, token] : special_tokens) {
    special_tokens_.set(jinja::Text(key, jinja::Origin::kTemplate), jinja::Text(token, jinja::Origin::kTemplate));
  }
  // Files carry the arguments of tool calls as objects or, as OpenAI's interface does, as JSON in a string. Some
  // templates take both; others fail on a string, or quote it once more. A trial tells.
  const auto try_with = [&](Json arguments) -> std::optional<std::string> {
    Json call = {{"type", "function"}, {"function", {{"name", "f"}, {"arguments", std::move(arguments)}}}};
    Json messages = {{{"role", "user"}, {"content", "q"}},
                     {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array({call})}}};
    try {
      return render({messages, nullptr, nullptr}, {}).text.str();
    } catch (const Error&) {
      return std::nullopt;  // a template may take no tool calls at all
    }
  };
  const auto with_string = try_with(R"({"a": 1})");
  const bool takes_strings = with_string && with_string->find(R"(\"a\")") == std::string::npos;
  parse_arguments_ = !takes_strings && try_with({{"a", 1}});
}

jinja::Output ChatTemplate::render(const Chat& chat, const ChatOptions& options) const {
  if (!chat.messages.is_array() || chat.messages.empty())
    fail_data("messages must be a list with at least one message");
  const auto key = [](std::string_view name) { return jinja::Text(name, jinja::Origin::kTemplate); };
  auto variables = special_tokens_;
  try {
    std::vector<jinja::Value> messages;
    for (std::size_t i = 0; i < chat.messages.size(); ++i)
      messages.push_back(message_value(chat.messages[i], i, parse_arguments_));
    variables.set(key("messages"), jinja::List(std::move(messages)));
    variables.set(key("tools"), jinja::from_json(tool_list(chat.tools)));
    variables.set(key("documents"), jinja::None{});
    variables.set(key("add_generation_prompt"), options.add_generation_prompt);
    if (options.enable_thinking) variables.set(key("enable_thinking"), *options.enable_thinking);
    if (!chat.variables.is_null() && !chat.variables.is_object()) fail_data("chat_template_kwargs must be an object");
    for (const auto& [name, value] : chat.variables.items()) variables.set(key(name), jinja::from_json(value));
  } catch (const jinja::Problem& problem) {
    fail_data("the conversation has {}", problem.what());
  }
  return template_.render(variables);
}

ChatEncoder::ChatEncoder(Tokenizer tokenizer, SpecialTokens special)
    : tokenizer_(std::move(tokenizer)), special_(special) {
  for (TokenId id = 0; id < tokenizer_.vocab_size(); ++id) {
    if (tokenizer_.is_special(id)) controls_.emplace_back(tokenizer_.id_to_token(id), id);
  }
  for (const auto& control : controls_) begins_control_[static_cast<unsigned char>(control.first[0])] = true;
  std::stable_sort(controls_.begin(), controls_.end(),
                   [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
}

// The size of the longest control token that stands at `byte`; 0 if there is none.
std::size_t ChatEncoder::control_at(const std::string& text, std::size_t byte, TokenId& id) const {
  if (!begins_control_[static_cast<unsigned char>(text[byte])]) return 0;
  for (const auto& [control, control_id] : controls_) {
    if (text.compare(byte, control.size(), control) == 0) {
      id = control_id;
      return control.size();
    }
  }
  return 0;
}

EncodedText ChatEncoder::encode(const jinja::Text& text) const {
  EncodedText encoded;
  const auto& bytes = text.str();
  std::size_t begin = 0;  // of the text that is not encoded yet
  const auto encode_until = [&](std::size_t end) {
    if (end == begin) return;
    encoded.pieces.push_back({begin, end, encoded.tokens.size(), false});
    const auto ids = tokenizer_.encode(std::string_view(bytes).substr(begin, end - begin), SpecialTokens::kLiteral);
    encoded.tokens.insert(encoded.tokens.end(), ids.begin(), ids.end());
  };
  for (std::size_t at = 0; at < bytes.size();) {
    TokenId id = 0;
    const auto size = control_at(bytes, at, id);
    bool is_control = size > 0;
    for (std::size_t i = at; is_control && special_ == SpecialTokens::kLiteral && i < at + size; ++i) {
      is_control = text.origin(i) == jinja::Origin::kTemplate;
    }
    if (!is_control) {
      encoded.literal_specials += size > 0 ? 1 : 0;
      ++at;
      continue;
    }
    encode_until(at);
    encoded.pieces.push_back({at, at + size, encoded.tokens.size(), true});
    encoded.tokens.push_back(id);
    at += size;
    begin = at;
  }
  encode_until(bytes.size());
  return encoded;
}

std::optional<std::size_t> ChatEncoder::tokens_before(const jinja::Text& text, const EncodedText& encoded,
                                                      std::size_t byte) const {
  for (const auto& piece : encoded.pieces) {
    if (byte <= piece.begin) return piece.first_token;
    if (byte >= piece.end) continue;
    if (piece.is_control) return std::nullopt;
    const auto prefix = tokenizer_.encode(std::string_view(text.str()).substr(piece.begin, byte - piece.begin),
                                          SpecialTokens::kLiteral);
    if (piece.first_token + prefix.size() > encoded.tokens.size()) return std::nullopt;
    const bool agrees = std::equal(prefix.begin(), prefix.end(),
                                   encoded.tokens.begin() + static_cast<std::ptrdiff_t>(piece.first_token));
    if (!agrees) return std::nullopt;
    return piece.first_token + prefix.size();
  }
  return encoded.tokens.size();
}

}  // namespace sluice
