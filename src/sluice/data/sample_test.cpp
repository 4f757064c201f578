// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/sample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kTiny = fs::path(SLUICE_SOURCE_DIR) / "examples/tiny/tokenizer";
const fs::path kQwen3 = fs::path(SLUICE_SOURCE_DIR) / "../shared/data/qwen3-tokenizer";  // too large for the repository

Record record_of(const std::string& json) { return {nlohmann::ordered_json::parse(json), "chats.jsonl:7"}; }

SampleMaker maker(const SampleOptions& options = {}, const ChatTemplate& chat_template = ChatTemplate::built_in()) {
  return {Tokenizer::load(kTiny), chat_template, options};
}

// The sample's text with its trained tokens between « and ».
std::string shown(const SampleMaker& maker, const std::string& json) {
  return show_sample(maker.make(record_of(json)), maker.tokenizer(), false);
}

std::string error_of(const SampleMaker& maker, const std::string& json) {
  try {
    maker.make(record_of(json));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(), testing::StartsWith("chats.jsonl:7: "));
    return error.what();
  }
  return "no error";
}

// Reasoning of turns behind the last question is kept and always framed, that of earlier turns dropped; the generation
// prompt opens the reasoning, or closes it at once without thinking.
constexpr const char* kThinking = R"(
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\n' -}}
  {%- if m.role == 'assistant' and loop.index0 > ns.last -%}{{- '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' -}}{%- endif -%}
  {{- m.content ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' ~ ('\n</think>\n\n' if enable_thinking is false else '') -}}{%- endif -%})";

constexpr const char* kTwoTurns =
    R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q1"},
  {"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]})";

TEST(ChatSample, TrainsEachTurnWithItsEndAndNothingElse) {
  EXPECT_EQ(shown(maker(), kTwoTurns),
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
            "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«a2<|im_end|>»\n");
}

TEST(ChatSample, LastTurnOrAll) {
  EXPECT_THAT(shown(maker({.loss_on = LossOn::kLastTurn}), kTwoTurns),
              HasSubstr("assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
                        "<|im_start|>assistant\n«a2<|im_end|>»\n"));
  EXPECT_THAT(shown(maker({.loss_on = LossOn::kAll}), kTwoTurns),
              testing::AllOf(testing::StartsWith("«<|im_start|>"), testing::EndsWith("\n»")));
}

TEST(ChatSample, AMessageMaySayWhetherItIsTrained) {
  const auto with = [](const std::string& key, const std::string& turn) {
    return R"({"messages": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1")" +
           (turn == "a1" ? key : "") +
           R"(}, {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2")" +
           (turn == "a2" ? key : "") + "}]}";
  };
  EXPECT_THAT(shown(maker(), with(R"(, "weight": 0)", "a1")), HasSubstr("assistant\na1<|im_end|>\n"));
  EXPECT_THAT(shown(maker(), with(R"(, "train": false)", "a1")), HasSubstr("«a2<|im_end|>»"));
  // Behind the last trained turn nothing is learned, so it is left out.
  EXPECT_EQ(shown(maker(), with(R"(, "train": 0)", "a2")),
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n");
  EXPECT_THAT(error_of(maker(), with(R"(, "weight": 0.5)", "a1")),
              HasSubstr("messages[1].weight must be 0 or 1, got 0.5"));
  EXPECT_THAT(error_of(maker(), R"({"messages": [{"role": "user", "content": "q", "train": 1}]})"),
              HasSubstr("only a turn of the assistant"));
}

TEST(ChatSample, ToolCallsAreTrainedAndToolResultsAreNot) {
  EXPECT_EQ(
      shown(
          maker(),
          R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
                              {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]})"),
      "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": "
      "1}}\n</tool_call><|im_end|>»\n"
      "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n");
}

TEST(ChatSample, ContentThatLooksLikeMarkersMovesNoSpan) {
  const auto sample =
      maker().make(record_of(R"({"messages": [{"role": "user", "content": "<|im_start|>assistant\nx<|im_end|>"},
                                                 {"role": "assistant", "content": "<|im_start|>assistant\na<|im_end|>\n"}]})"));
  EXPECT_EQ(show_sample(sample, maker().tokenizer(), false),
            "<|im_start|>user\n<|im_start|>assistant\nx<|im_end|><|im_end|>\n<|im_start|>assistant\n«<|im_start|>"
            "assistant\na<|im_end|>\n<|im_end|>»\n");
  EXPECT_EQ(sample.literal_specials, 4);
}

// D3: the prompt's ids are a prefix, and the trained part starts right behind.
TEST(ChatSample, ThePromptIsAPrefixOfTheWhole) {
  const ChatTemplate thinking(kThinking, "thinking");
  for (const bool think : {false, true}) {
    const auto turn = std::string(R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a")") +
                      (think ? R"(, "reasoning_content": "r")" : "") + "}]";
    const SampleOptions options{.enable_thinking = think};
    const auto sample = maker(options, thinking).make(record_of(R"({"messages": )" + turn + "}"));
    const auto prompt = thinking.render(
        {nlohmann::ordered_json::parse(R"([{"role": "user", "content": "q"}])"), nullptr, nullptr}, {true, think});
    const auto ids = ChatEncoder(Tokenizer::load(kTiny), SpecialTokens::kLiteral).encode(prompt.text).tokens;
    ASSERT_LT(ids.size(), sample.tokens.size());
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), sample.tokens.begin()));
    EXPECT_EQ(std::find(sample.loss_mask.begin(), sample.loss_mask.end(), 1) - sample.loss_mask.begin(),
              std::ssize(ids));
  }
}

TEST(ChatSample, APromptThatIsNoPrefixIsAnError) {
  const ChatTemplate thinking(kThinking, "thinking");
  // The prompt ends in "<think>\n"; without reasoning the turn goes on with "\n", and the two newlines are one token.
  EXPECT_THAT(error_of(maker({}, thinking),
                       R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})"),
              HasSubstr("tokens of the prompt of messages[1] are not a prefix"));
  EXPECT_THAT(
      error_of(
          maker({.enable_thinking = false}, thinking),
          R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]})"),
      HasSubstr("is not the beginning of the whole conversation"));
  // A record can say so itself.
  EXPECT_THAT(shown(maker({}, thinking), R"({"chat_template_kwargs": {"enable_thinking": false},
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})"),
              HasSubstr("</think>\n\n«a<|im_end|>»"));
}

TEST(ChatSample, EarlierTurnsStandWhereTheFinalRenderingHasThem) {
  const ChatTemplate thinking(kThinking, "thinking");
  EXPECT_EQ(
      shown(
          maker({}, thinking),
          R"({"messages": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
              {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2", "reasoning_content": "r2"}]})"),
      "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n<|im_start|>user\nq2<|im_end|>\n"
      "<|im_start|>assistant\n<think>\n«r2\n</think>\n\na2<|im_end|>»\n");
}

TEST(ChatSample, ATemplateThatHidesTheTurnsIsAnError) {
  const std::string record =
      R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})";
  EXPECT_THAT(
      error_of(
          maker({}, ChatTemplate("{{ messages[0].content }}{% if messages[1] %}{{ messages[1].content }}{% endif %}",
                                 "flat")),
          record),
      HasSubstr("in a loop over the messages"));
  EXPECT_THAT(error_of(maker({}, ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
                                              "add_generation_prompt %}assistant:{% endif %}",
                                              "endless")),
                       record),
              HasSubstr("does not end messages[1] with a control token"));
}

TEST(ChatSample, Qwen3) {
  if (!fs::exists(kQwen3)) GTEST_SKIP() << "the Qwen3 tokenizer is not here";
  const SampleMaker qwen3(Tokenizer::load(kQwen3), ChatTemplate::load(kQwen3), {});
  const std::string head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(
      shown(
          qwen3,
          R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r\n</think>\n\na"}]})"),
      head + "«<think>\nr\n</think>\n\na<|im_end|>»\n");
  EXPECT_EQ(shown(qwen3, R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})"),
            head + "«<think>\n\n</think>\n\na<|im_end|>»\n");
}

TEST(PromptSample, TrainsTheCompletionAndTheEnd) {
  EXPECT_EQ(shown(maker(), R"({"prompt": "1 + 1 =", "completion": " 2"})"), "1 + 1 =« 2<|im_end|>»");
  EXPECT_EQ(
      shown(
          maker(),
          R"({"prompt": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"}],
                               "completion": [{"role": "assistant", "content": "a2"}]})"),
      "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|"
      ">assistant\n«a2<|im_end|>»\n");
  EXPECT_THAT(error_of(maker(), R"({"prompt": "q"})"),
              HasSubstr("two strings or two lists of messages, got string and null"));
}

TEST(TextSample, TrainsAllButTheFirstToken) {
  const auto sample = maker().make(record_of(R"({"text": "a<|im_end|>"})"));
  EXPECT_EQ(sample.trained_tokens(), std::ssize(sample.tokens) - 1);
  EXPECT_EQ(sample.literal_specials, 1);
  const auto control = maker({.special = SpecialTokens::kControl}).make(record_of(R"({"text": "a<|im_end|>"})"));
  EXPECT_EQ(control.tokens.size(), 2U);  // its own end token serves
}

TEST(TokenSample, TakesIdsWithLabelsOrMask) {
  EXPECT_THAT(maker().make(record_of(R"({"tokens": [5, 6, 7]})")).loss_mask, ElementsAre(1, 1, 1));
  EXPECT_THAT(maker().make(record_of(R"({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})")).loss_mask,
              ElementsAre(0, 1, 1));
  EXPECT_THAT(maker().make(record_of(R"({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]})")).loss_mask,
              ElementsAre(0, 0, 1));
  EXPECT_THAT(error_of(maker(), R"({"input_ids": [5, 6], "labels": [-100, 7]})"), HasSubstr("labels are not shifted"));
  EXPECT_THAT(error_of(maker(), R"({"input_ids": [5, 6], "labels": [6]})"), HasSubstr("a list of 2 values"));
  EXPECT_THAT(error_of(maker(), R"({"tokens": [5, 1000000]})"), HasSubstr("tokens[1] must be a token id below"));
  EXPECT_THAT(error_of(maker(), R"({"tokens": [5, -1]})"), HasSubstr("tokens[1]"));
}

TEST(Sample, MessagesWinAndUnknownRecordsAreErrors) {
  EXPECT_THAT(
      shown(maker(),
            R"({"text": "t", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})"),
      HasSubstr("«a<|im_end|>»"));
  EXPECT_THAT(error_of(maker(), R"({"question": "q", "answer": "a"})"), HasSubstr("this one has: question, answer"));
}

TEST(ShowSample, ColoursWhatIsTrained) {
  const auto sample = maker().make(record_of(R"({"prompt": "q", "completion": "a"})"));
  EXPECT_EQ(show_sample(sample, maker().tokenizer(), true), "q\x1b[32ma<|im_end|>\x1b[0m");
}

}  // namespace
}  // namespace sluice
