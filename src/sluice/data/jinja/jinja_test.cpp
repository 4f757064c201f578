// SPDX-License-Identifier: Apache-2.0
// What Python's jinja2 cannot be compared with: messages, limits, origins. tests/test_chat_template.py compares the
// language.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/data/jinja/template.h"

namespace sluice::jinja {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

Output render(const std::string& source, const std::string& variables = "{}", const Limits& limits = {}) {
  const auto values = from_json(nlohmann::ordered_json::parse(variables));
  return Template(source, "t.jinja").render(*values.dict(), limits);
}

std::string error_of(const std::string& source, const std::string& variables = "{}", const Limits& limits = {}) {
  try {
    render(source, variables, limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    return error.what();
  }
  return "no error";
}

// The text with [ ] around what came from data.
std::string marked(const Text& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool data = text.origin(i) == Origin::kData;
    const bool before = i > 0 && text.origin(i - 1) == Origin::kData;
    if (data != before) out += data ? '[' : ']';
    out += text.str()[i];
  }
  return text.empty() || text.origin(text.size() - 1) == Origin::kTemplate ? out : out + ']';
}

TEST(JinjaError, NamesTemplateLineAndConstruct) {
  EXPECT_EQ(error_of("\n\n{% for x in y %}"), "t.jinja:3: 'for' is not closed by 'endfor'");
  EXPECT_EQ(error_of("\n{{ 1 + }}"), "t.jinja:2: expected an expression, got '}}'");
  EXPECT_EQ(error_of("\n{% include 'x' %}"),
            "t.jinja:2: the statement 'include' is unknown, not supported, or closes nothing here");
  EXPECT_EQ(error_of("a\n{{ x.y }}"), "t.jinja:2: 'x' is undefined, so it has no 'y'");
  EXPECT_EQ(error_of("{{ 1 }}\n{{ 'a' | items }}"),
            "t.jinja:2: filter 'items' needs a mapping, got a string (arguments of a tool call given as a string?)");
  EXPECT_EQ(error_of("\n{{ raise_exception('no') }}"), "t.jinja:2: the template says: no");
  EXPECT_EQ(error_of("{{ 'a'\n + none }}"), "t.jinja:2: '+' does not work on a string and none");
  EXPECT_EQ(error_of("{{ x | trim(1, 2) }}"), "t.jinja:1: filter 'trim' takes 1 arguments here, got 2");
}

TEST(JinjaLimits, AnUntrustedTemplateEnds) {
  const Limits small{.steps = 10'000, .bytes = 10'000};
  EXPECT_THAT(error_of("{% for i in range(100000) %}{% endfor %}", "{}", small), HasSubstr("limit of steps"));
  EXPECT_THAT(error_of("{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}", "{}", small),
              HasSubstr("limit of steps"));
  EXPECT_THAT(
      error_of("{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "{}",
               small),
      HasSubstr("limit of bytes"));
  EXPECT_THAT(error_of("{{ 'x' * 1000000000000 }}", "{}", small), HasSubstr("limit of bytes"));
  EXPECT_THAT(error_of("{{ s.replace('a', s) }}", R"({"s": ")" + std::string(200, 'a') + "\"}", small),
              HasSubstr("limit of bytes"));
  EXPECT_THAT(error_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), HasSubstr("does a macro call itself"));
  EXPECT_THAT(error_of("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}"),
              HasSubstr("nested more than"));
  EXPECT_THAT(error_of("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}"),
              HasSubstr("nested more than"));
  std::string chain = "x";
  for (int i = 0; i < 5000; ++i) chain += ".a";
  EXPECT_THAT(error_of("{{ " + chain + " }}"), HasSubstr("nested more than"));
  EXPECT_THAT(error_of("{{ 9223372036854775807 + 1 }}"), HasSubstr("64 bits"));
  // 2^60 elements in 60 lists: neither printed nor compared.
  const std::string doubling =
      "{% set a = namespace(l=[1]) %}{% set b = namespace(l=[1]) %}{% for i in range(60) %}{% set a.l = [a.l, a.l] %}"
      "{% set b.l = [b.l, b.l] %}{% endfor %}";
  EXPECT_THAT(error_of(doubling + "{{ a.l }}"), HasSubstr("a value of more than 128000000 bytes"));
  EXPECT_THAT(error_of(doubling + "{{ a.l == b.l }}"), HasSubstr("a value of more than 128000000 bytes"));
  EXPECT_THAT(error_of("{% set ns = namespace() %}{% set ns.self = ns %}"), HasSubstr("cannot be stored"));
}

TEST(JinjaLimits, DeepOrHugeVariablesAreRefused) {
  const std::string deep = std::string(300, '[') + std::string(300, ']');
  EXPECT_THROW(from_json(nlohmann::ordered_json::parse(deep)), Problem);
  EXPECT_THROW(from_json(nlohmann::ordered_json::parse("18446744073709551615")), Problem);
}

TEST(JinjaText, EachByteKnowsItsOrigin) {
  const std::string data = R"({"s": "<e>", "d": {"k": "<e>"}})";
  const auto of = [&](const std::string& source) { return marked(render(source, data).text); };
  EXPECT_EQ(of("<e>{{ s }}<e>"), "<e>[<e>]<e>");
  EXPECT_EQ(of("{{ '<e>' + s ~ '<e>' }}"), "<e>[<e>]<e>");
  EXPECT_EQ(of("{{ (' ' + s + ' ') | trim }}"), "[<e>]");
  EXPECT_EQ(of("{{ ('a' + s)[0:3] }}"), "a[<e]");
  EXPECT_EQ(of("{{ ('a,' + s).split(',') | join('<e>') }}"), "a<e>[<e>]");
  EXPECT_EQ(of("{{ s.replace('e', 'x') }}"), "[<]x[>]");
  EXPECT_EQ(of("{{ s | upper }}"), "[<E>]");
  EXPECT_EQ(of("{{ d | tojson }}"), R"([{"k": "<e>"}])");
  EXPECT_EQ(of("{{ d }}"), "{'[k]': '[<e>]'}");
  EXPECT_EQ(of("{% macro m(x) %}<e>{{ x }}{% endmacro %}{{ m(s) }}"), "<e>[<e>]");
  EXPECT_EQ(of("{% set x %}<e>{{ s }}{% endset %}{{ x }}"), "<e>[<e>]");
}

TEST(JinjaOutput, ReportsWhatALoopWroteForEachMessage) {
  std::vector<Value> messages;
  for (int i = 0; i < 3; ++i) {
    Dict message;
    message.set(Text("n", Origin::kData), static_cast<std::int64_t>(i));
    message.message = i;
    messages.emplace_back(std::move(message));
  }
  Dict variables;
  variables.set(Text("messages", Origin::kTemplate), List(messages));
  const Template source(
      "{% for m in messages[::-1] %}{% endfor %}head {% for m in messages[1:] %}<{{ m.n }}>{% endfor %}", "t");
  const auto output = source.render(variables);
  EXPECT_EQ(output.text.str(), "head <1><2>");
  ASSERT_EQ(output.blocks.size(), 2U);
  EXPECT_EQ(output.blocks[0].message, 1);
  EXPECT_EQ(output.text.str().substr(output.blocks[0].begin, output.blocks[0].end - output.blocks[0].begin), "<1>");
  EXPECT_EQ(output.text.str().substr(output.blocks[1].begin, output.blocks[1].end - output.blocks[1].begin), "<2>");
}

TEST(JinjaTemplate, RefusesWhatIsNotText) {
  EXPECT_THAT(error_of("\xff"), StartsWith("t.jinja"));
  EXPECT_THAT(error_of(std::string((1 << 20) + 1, 'x')), HasSubstr("at most 1 MiB"));
}

}  // namespace
}  // namespace sluice::jinja
