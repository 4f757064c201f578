// SPDX-License-Identifier: Apache-2.0
// One training sample: tokens, and which of them the loss counts. Made from a record of a data file:
//   messages (+ tools, chat_template_kwargs)   through the chat template; wins if other keys are there too
//   prompt, completion                         two strings, joined without a template, or two lists of messages
//   text                                       a string, all of it trained
//   tokens or input_ids (+ labels or loss_mask)
//
// Which tokens of a conversation are trained: of each assistant's turn what the model would have said, that is,
// everything behind the header up to and with the control token that ends the turn; not the header, nor what the
// template writes behind that token. Places are known from the rendering itself: the interpreter reports which bytes
// the template's loop wrote for which message, so nothing is searched and templates that strip earlier reasoning cannot
// shift a span.
//   - Of the last trained turn: the rendering of what comes before it, with generation prompt, must be a prefix of the
//     rendering of the whole, in bytes and in tokens, and the span starts right behind. Otherwise the model would be
//     trained behind a prompt that it never gets when sampled; that is an error.
//   - Of an earlier turn: the span starts where the turn's tokens, in the final rendering, cease to agree with those of
//     the generation prompt. (A template may drop that prompt's "<think>" from past turns.)
// Messages behind the last trained turn are left out: nothing is learned from them, and they could change how it is
// rendered.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/data/chat_template.h"
#include "sluice/data/records.h"

namespace sluice {

struct Sample {
  std::vector<TokenId> tokens;
  std::vector<std::uint8_t> loss_mask;  // [tokens] 1: the loss of predicting this token counts
  std::string place;                    // of the record: "chats.jsonl:17"
  std::int64_t literal_specials = 0;    // places that look like a control token and are text

  // Tokens that the loss counts. The first token of a sample has nothing before it, so it is never a target.
  std::int64_t trained_tokens() const;
};

enum class LossOn {
  kAssistant,  // every turn of the assistant; `train` or `weight` of a message (0 or 1) says otherwise
  kLastTurn,   // only the assistant's last turn
  kAll,        // every token
};

struct SampleOptions {
  LossOn loss_on = LossOn::kAssistant;
  SpecialTokens special = SpecialTokens::kLiteral;  // also for prompt, completion and text
  std::optional<bool> enable_thinking = std::nullopt;
};

class SampleMaker {
 public:
  SampleMaker(Tokenizer tokenizer, ChatTemplate chat_template, const SampleOptions& options);

  // Data error, with the record's place in front, if the record is malformed or its prompt is not a prefix of the
  // whole. A sample without a trained token is returned as it is.
  Sample make(const Record& record) const;

  const Tokenizer& tokenizer() const { return encoder_.tokenizer(); }

 private:
  Sample from_chat(const Chat& chat, const std::vector<bool>& trained) const;
  Sample from_prompt(const nlohmann::ordered_json& record) const;
  Sample from_text(const std::string& text) const;
  Sample from_tokens(const nlohmann::ordered_json& record, const char* key) const;
  std::vector<bool> trained_turns(const nlohmann::ordered_json& messages, std::size_t first) const;
  void append(Sample& sample, const std::string& text, bool trained) const;
  void append_end(Sample& sample) const;

  ChatEncoder encoder_;
  ChatTemplate template_;
  SampleOptions options_;
};

// Tells samples from others by their tokens and masks, in their order.
std::string fingerprint(const std::vector<Sample>& samples);

// The sample's text with its trained tokens in colour, or between « and » without colour. For `sluice tokenize --show`.
std::string show_sample(const Sample& sample, const Tokenizer& tokenizer, bool colour);

}  // namespace sluice
