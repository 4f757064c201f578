// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/sample.h"

#include <algorithm>

#include "sluice/core/error.h"

namespace sluice {
using Json = nlohmann::ordered_json;

std::int64_t Sample::trained_tokens() const {
  return loss_mask.empty() ? 0 : std::count(loss_mask.begin() + 1, loss_mask.end(), std::uint8_t{1});
}

SampleMaker::SampleMaker(Tokenizer tokenizer, ChatTemplate chat_template, const SampleOptions& options)
    : encoder_(std::move(tokenizer), options.special), template_(std::move(chat_template)), options_(options) {}

namespace {

const Json* find(const Json& record, const char* key) {
  const auto place = record.find(key);
  return place == record.end() || place->is_null() ? nullptr : &*place;
}

// `train` or `weight` of a message: 0 or 1, or a boolean.
bool is_trained(const Json& message, std::size_t place, bool otherwise) {
  for (const auto* key : {"train", "weight"}) {
    const auto* value = find(message, key);
    if (!value) continue;
    if (value->is_boolean()) return value->get<bool>();
    if (value->is_number() && (*value == 0 || *value == 1)) return *value == 1;
    fail_data("messages[{}].{} must be 0 or 1, got {}", place, key, value->dump());
  }
  return otherwise;
}

std::vector<TokenId> token_list(const Json& list, const char* key, const Tokenizer& tokenizer) {
  if (!list.is_array()) fail_data("{} must be a list of token ids, got {}", key, list.type_name());
  std::vector<TokenId> tokens;
  for (const auto& id : list) {
    if (!id.is_number_integer() || id < 0 || id >= tokenizer.vocab_size()) {
      fail_data("{}[{}] must be a token id below {}, got {}", key, tokens.size(), tokenizer.vocab_size(), id.dump());
    }
    tokens.push_back(id.get<TokenId>());
  }
  return tokens;
}

}  // namespace

Sample SampleMaker::make(const Record& record) const {
  const auto& json = record.json;
  const auto chat = [&](Json messages) {
    return Chat{std::move(messages), value_or_null(json, "tools"), value_or_null(json, "chat_template_kwargs")};
  };
  try {
    Sample sample;
    if (const auto* messages = find(json, "messages")) {
      sample = from_chat(chat(*messages), trained_turns(*messages, 0));
    } else if (find(json, "prompt") || find(json, "completion")) {
      const auto prompt = value_or_null(json, "prompt");
      const auto completion = value_or_null(json, "completion");
      if (prompt.is_array() && completion.is_array()) {
        auto all = prompt;
        all.insert(all.end(), completion.begin(), completion.end());
        sample = from_chat(chat(all), trained_turns(all, prompt.size()));
      } else {
        sample = from_prompt(json);
      }
    } else if (const auto* text = find(json, "text")) {
      if (!text->is_string()) fail_data("text must be a string, got {}", text->type_name());
      sample = from_text(text->get<std::string>());
    } else if (find(json, "tokens") || find(json, "input_ids")) {
      sample = from_tokens(json, find(json, "tokens") ? "tokens" : "input_ids");
    } else {
      fail_data("a record needs messages, prompt and completion, text, tokens or input_ids; this one has: {}",
                fmt::join(
                    [&] {
                      std::vector<std::string> keys;
                      for (const auto& item : json.items()) keys.push_back(item.key());
                      return keys;
                    }(),
                    ", "));
    }
    sample.place = record.place;
    return sample;
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", record.place, error.what()));
  }
}

// For each message whether the loss counts it. The assistant's turns before `first` belong to a prompt.
std::vector<bool> SampleMaker::trained_turns(const Json& messages, std::size_t first) const {
  if (!messages.is_array()) fail_data("messages must be a list, got {}", messages.type_name());
  std::vector<bool> trained(messages.size(), false);
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (!messages[i].is_object()) fail_data("messages[{}] must be an object, got {}", i, messages[i].type_name());
    const bool is_assistant = value_or_null(messages[i], "role") == "assistant";
    trained[i] = is_trained(messages[i], i, is_assistant && i >= first);
    if (trained[i] && !is_assistant) fail_data("messages[{}]: only a turn of the assistant can be trained", i);
    if (trained[i] && options_.loss_on == LossOn::kLastTurn) break;
  }
  return trained;
}

Sample SampleMaker::from_chat(const Chat& chat, const std::vector<bool>& trained) const {
  const ChatOptions whole_options{false, options_.enable_thinking};
  const ChatOptions prompt_options{true, options_.enable_thinking};
  const auto last_trained = std::find(trained.rbegin(), trained.rend(), true);
  const auto kept = static_cast<std::size_t>(trained.rend() - last_trained);  // messages up to the last trained one
  const bool train_all = options_.loss_on == LossOn::kAll;

  auto shortened = chat;
  if (!train_all && kept > 0)
    shortened.messages.erase(shortened.messages.begin() + static_cast<std::ptrdiff_t>(kept), shortened.messages.end());
  const auto whole = template_.render(shortened, whole_options);
  const auto encoded = encoder_.encode(whole.text);
  Sample sample{encoded.tokens, std::vector<std::uint8_t>(encoded.tokens.size(), train_all ? 1 : 0), "",
                encoded.literal_specials};
  if (train_all || kept == 0) return sample;

  const auto last = kept - 1;
  if (last == 0) fail_data("messages[0] is the assistant's: a trained turn needs a message before it");
  const auto block_of = [&](std::size_t message) {
    const jinja::MessageBlock* found = nullptr;
    for (const auto& block : whole.blocks) {
      if (block.message != static_cast<int>(message)) continue;
      if (found)
        fail_data("{} writes messages[{}] at two places: which one to train is unclear", template_.name(), message);
      found = &block;
    }
    if (!found)
      fail_data("{} does not write messages[{}] in a loop over the messages, so its place is unknown", template_.name(),
                message);
    return *found;
  };

  auto before = shortened;
  before.messages.erase(before.messages.begin() + static_cast<std::ptrdiff_t>(last), before.messages.end());
  const auto prompt = template_.render(before, prompt_options);
  const auto last_block = block_of(last);
  const auto prompt_size = prompt.text.size();
  if (!whole.text.str().starts_with(prompt.text.str()) || prompt_size < last_block.begin ||
      prompt_size > last_block.end) {
    const auto differs = std::mismatch(prompt.text.str().begin(), prompt.text.str().end(), whole.text.str().begin(),
                                       whole.text.str().end());
    const auto from = static_cast<std::size_t>(differs.first - prompt.text.str().begin());
    fail_data(
        "the prompt of messages[{}] with generation prompt is not the beginning of the whole conversation: {} writes "
        "{} there, and {} with the turn behind it. Set enable_thinking in the record's chat_template_kwargs to what "
        "the "
        "turn shows, or use a template that keeps them equal",
        last, template_.name(),
        Json(prompt.text.str().substr(from, 40)).dump(-1, ' ', false, Json::error_handler_t::replace),
        Json(whole.text.str().substr(from, 40)).dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  const auto start_of_last = encoder_.tokens_before(whole.text, encoded, prompt_size);
  if (!start_of_last) {
    fail_data(
        "the tokens of the prompt of messages[{}] are not a prefix of those of the whole conversation: its first "
        "characters join those of the generation prompt, {}. Set enable_thinking in the record's chat_template_kwargs "
        "to what the turn shows, or strip the turn's leading white space",
        last, Json(prompt.text.str().substr(last_block.begin)).dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  const auto token_at = [&](std::size_t byte, std::size_t message) {
    const auto count = encoder_.tokens_before(whole.text, encoded, byte);
    if (!count)
      fail_data("{} writes messages[{}] so that one token belongs to two messages", template_.name(), message);
    return *count;
  };
  const auto header = token_at(last_block.begin, last);  // first token of the generation prompt

  for (std::size_t i = 0; i < kept; ++i) {
    if (!trained[i]) continue;
    const auto block = block_of(i);
    auto end_byte = block.end;
    while (end_byte > block.begin && whole.text.origin(end_byte - 1) == jinja::Origin::kTemplate &&
           jinja::is_space(static_cast<unsigned char>(whole.text.str()[end_byte - 1]))) {
      --end_byte;
    }
    auto start = token_at(block.begin, i);
    const auto end = token_at(end_byte, i);
    if (end == start || !encoder_.tokenizer().is_special(encoded.tokens[end - 1])) {
      fail_data("{} does not end messages[{}] with a control token, so the model would not learn to stop",
                template_.name(), i);
    }
    const auto first = start;
    for (auto of_header = header;
         of_header < *start_of_last && start < end && encoded.tokens[start] == encoded.tokens[of_header]; ++of_header) {
      ++start;
    }
    if (start == first)
      fail_data("{} does not begin messages[{}] as it begins messages[{}], so its header is unknown", template_.name(),
                i, last);
    std::fill(sample.loss_mask.begin() + static_cast<std::ptrdiff_t>(start),
              sample.loss_mask.begin() + static_cast<std::ptrdiff_t>(end), 1);
  }
  return sample;
}

void SampleMaker::append(Sample& sample, const std::string& text, bool trained) const {
  const auto encoded = encoder_.encode(jinja::Text(text, jinja::Origin::kData));
  sample.tokens.insert(sample.tokens.end(), encoded.tokens.begin(), encoded.tokens.end());
  sample.loss_mask.resize(sample.tokens.size(), trained ? 1 : 0);
  sample.literal_specials += encoded.literal_specials;
}

// The end token, trained, unless the text brought it along.
void SampleMaker::append_end(Sample& sample) const {
  const auto end = encoder_.tokenizer().eos_id();
  if (!end)
    fail_data(
        "the tokenizer names no end token (eos_token in tokenizer_config.json), which prompt and completion or text "
        "need");
  if (!sample.tokens.empty() && sample.tokens.back() == *end) return;
  sample.tokens.push_back(*end);
  sample.loss_mask.push_back(1);
}

// The two strings are encoded one by one: the model is sampled behind the tokens of the prompt, whatever follows.
Sample SampleMaker::from_prompt(const Json& record) const {
  const auto prompt = value_or_null(record, "prompt");
  const auto completion = value_or_null(record, "completion");
  if (!prompt.is_string() || !completion.is_string()) {
    fail_data("prompt and completion must be two strings or two lists of messages, got {} and {}", prompt.type_name(),
              completion.type_name());
  }
  Sample sample;
  append(sample, prompt.get<std::string>(), options_.loss_on == LossOn::kAll);
  append(sample, completion.get<std::string>(), true);
  append_end(sample);
  return sample;
}

Sample SampleMaker::from_text(const std::string& text) const {
  Sample sample;
  append(sample, text, true);
  append_end(sample);
  return sample;
}

Sample SampleMaker::from_tokens(const Json& record, const char* key) const {
  Sample sample;
  sample.tokens = token_list(record[key], key, tokenizer());
  sample.loss_mask.assign(sample.tokens.size(), 1);
  const auto same_size = [&](const Json& list, const char* name) {
    if (!list.is_array() || list.size() != sample.tokens.size()) {
      fail_data("{} must be a list of {} values, one for each of {}", name, sample.tokens.size(), key);
    }
  };
  if (const auto* labels = find(record, "labels")) {
    same_size(*labels, "labels");
    for (std::size_t i = 0; i < sample.tokens.size(); ++i) {
      sample.loss_mask[i] = (*labels)[i] == -100 ? 0 : 1;
      if (sample.loss_mask[i] && (*labels)[i] != sample.tokens[i]) {
        fail_data("labels[{}] must be -100 or equal {}[{}], which is {}, got {}; labels are not shifted", i, key, i,
                  sample.tokens[i], (*labels)[i].dump());
      }
    }
  } else if (const auto* mask = find(record, "loss_mask")) {
    same_size(*mask, "loss_mask");
    for (std::size_t i = 0; i < sample.tokens.size(); ++i) {
      const auto& one = (*mask)[i];
      const bool known = one.is_boolean() || (one.is_number() && (one == 0 || one == 1));
      if (!known) fail_data("loss_mask[{}] must be 0 or 1, got {}", i, one.dump());
      sample.loss_mask[i] = one.is_boolean() ? one.get<bool>() : one == 1;
    }
  }
  return sample;
}

std::string show_sample(const Sample& sample, const Tokenizer& tokenizer, bool colour) {
  std::string shown;
  for (std::size_t begin = 0; begin < sample.tokens.size();) {
    auto end = begin;
    while (end < sample.tokens.size() && sample.loss_mask[end] == sample.loss_mask[begin]) ++end;
    const auto text = tokenizer.decode(std::span(sample.tokens).subspan(begin, end - begin));
    if (!sample.loss_mask[begin]) {
      shown += text;
    } else {
      shown += (colour ? "\x1b[32m" : "«") + text + (colour ? "\x1b[0m" : "»");
    }
    begin = end;
  }
  return shown;
}

}  // namespace sluice
