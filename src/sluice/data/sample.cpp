// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/sample.h"

#include <algorithm>
#include <span>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
using Json = nlohmann::ordered_json;

std::int64_t Sample::trained_tokens() const {
  return loss_mask.empty() ? 0 : std::count(loss_mask.begin() + 1, loss_mask.end(), std::uint8_t{1});
}

std::string fingerprint(const std::vector<Sample>& samples) {
  std::string sums;
  for (const auto& sample : samples) {
    sums += checksum(std::as_bytes(std::span(sample.tokens))) + checksum(std::as_bytes(std::span(sample.loss_mask)));
  }
  return checksum(std::as_bytes(std::span(sums)));
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

namespace {

std::string quoted(const std::string& text) { return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace); }

Chat first_messages(const Chat& chat, std::size_t count) {
  auto shortened = chat;
  shortened.messages.erase(shortened.messages.begin() + static_cast<std::ptrdiff_t>(count), shortened.messages.end());
  return shortened;
}

struct TokenSpan {
  std::size_t begin, end;
};

// A conversation that ends with a trained turn, as its template writes it.
class Rendering {
 public:
  Rendering(const ChatTemplate& chat_template, const ChatEncoder& encoder, const Chat& chat, const ChatOptions& options)
      : template_(chat_template),
        encoder_(encoder),
        last_(chat.messages.size() - 1),
        output_(chat_template.render(chat, options)),
        encoded_(encoder.encode(output_.text)) {}

  const EncodedText& encoded() const { return encoded_; }

  // The tokens with which a turn begins before the model speaks: what `prompt`, all that comes before the last turn
  // with its generation prompt, has of that turn. Data error if the prompt's text or tokens are no beginning of ours.
  TokenSpan header(const jinja::Text& prompt) const {
    const auto block = block_of(last_);
    const auto &text = output_.text.str(), &before = prompt.str();
    if (!text.starts_with(before) || before.size() < block.begin || before.size() > block.end) {
      const auto differs = std::mismatch(before.begin(), before.end(), text.begin(), text.end());
      const auto from = static_cast<std::size_t>(differs.first - before.begin());
      fail_data(
          "the prompt of messages[{}] with generation prompt is not the beginning of the whole conversation: {} writes "
          "{} there, and {} with the turn behind it. Set enable_thinking in the record's chat_template_kwargs to what "
          "the turn shows, or use a template that keeps them equal",
          last_, template_.name(), quoted(before.substr(from, 40)), quoted(text.substr(from, 40)));
    }
    const auto end = encoder_.tokens_before(output_.text, encoded_, before.size());
    if (!end) {
      fail_data(
          "the tokens of the prompt of messages[{}] are not a prefix of those of the whole conversation: its first "
          "characters join those of the generation prompt, {}. Set enable_thinking in the record's "
          "chat_template_kwargs to what the turn shows, or strip the turn's leading white space",
          last_, quoted(before.substr(block.begin)));
    }
    return {token_at(block.begin, last_), *end};
  }

  // What the model would have said in a turn: from where its tokens cease to agree with `header` up to and with the
  // control token that ends it.
  TokenSpan said(std::size_t message, TokenSpan header) const {
    const auto block = block_of(message);
    auto end_byte = block.end;
    while (end_byte > block.begin && is_template_space(end_byte - 1)) --end_byte;
    const auto first = token_at(block.begin, message), end = token_at(end_byte, message);
    const auto& tokens = encoded_.tokens;
    if (end == first || !encoder_.tokenizer().is_special(tokens[end - 1])) {
      fail_data("{} does not end messages[{}] with a control token, so the model would not learn to stop",
                template_.name(), message);
    }
    auto begin = first;
    for (auto i = header.begin; i < header.end && begin < end && tokens[begin] == tokens[i]; ++i) ++begin;
    if (begin == first) {
      fail_data("{} does not begin messages[{}] as it begins messages[{}], so its header is unknown", template_.name(),
                message, last_);
    }
    return {begin, end};
  }

 private:
  const jinja::MessageBlock& block_of(std::size_t message) const {
    const jinja::MessageBlock* found = nullptr;
    for (const auto& block : output_.blocks) {
      if (block.message != static_cast<int>(message)) continue;
      if (found != nullptr) {
        fail_data("{} writes messages[{}] at two places: which one to train is unclear", template_.name(), message);
      }
      found = &block;
    }
    if (found == nullptr) {
      fail_data("{} does not write messages[{}] in a loop over the messages, so its place is unknown", template_.name(),
                message);
    }
    return *found;
  }

  std::size_t token_at(std::size_t byte, std::size_t message) const {
    const auto count = encoder_.tokens_before(output_.text, encoded_, byte);
    if (!count) {
      fail_data("{} writes messages[{}] so that one token belongs to two messages", template_.name(), message);
    }
    return *count;
  }

  bool is_template_space(std::size_t byte) const {
    return output_.text.origin(byte) == jinja::Origin::kTemplate &&
           jinja::is_space(static_cast<unsigned char>(output_.text.str()[byte]));
  }

  const ChatTemplate& template_;
  const ChatEncoder& encoder_;
  std::size_t last_;
  jinja::Output output_;
  EncodedText encoded_;
};

}  // namespace

Sample SampleMaker::from_chat(const Chat& chat, const std::vector<bool>& trained) const {
  const bool train_all = options_.loss_on == LossOn::kAll;
  const auto last_trained = std::find(trained.rbegin(), trained.rend(), true);
  const auto kept = static_cast<std::size_t>(trained.rend() - last_trained);  // messages up to the last trained one
  const bool by_turns = !train_all && kept > 0;

  const Rendering whole(template_, encoder_, by_turns ? first_messages(chat, kept) : chat,
                        {.add_generation_prompt = false, .enable_thinking = options_.enable_thinking});
  const auto& encoded = whole.encoded();
  Sample sample{encoded.tokens, std::vector<std::uint8_t>(encoded.tokens.size(), train_all ? 1 : 0), "",
                encoded.literal_specials};
  if (!by_turns) return sample;

  if (kept == 1) fail_data("messages[0] is the assistant's: a trained turn needs a message before it");
  const auto prompt = template_.render(first_messages(chat, kept - 1),
                                       {.add_generation_prompt = true, .enable_thinking = options_.enable_thinking});
  const auto header = whole.header(prompt.text);
  for (std::size_t i = 0; i < kept; ++i) {
    if (!trained[i]) continue;
    const auto said = whole.said(i, header);
    std::fill(sample.loss_mask.begin() + static_cast<std::ptrdiff_t>(said.begin),
              sample.loss_mask.begin() + static_cast<std::ptrdiff_t>(said.end), 1);
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
