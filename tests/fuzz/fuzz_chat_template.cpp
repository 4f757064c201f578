// SPDX-License-Identifier: Apache-2.0
// Any text is a chat template or a data error; one that parses renders a conversation within its limits, or fails with
// a data error.
#include <cstddef>
#include <cstdint>
#include <string>

#include "sluice/core/error.h"
#include "sluice/data/jinja/template.h"

namespace {

using namespace sluice;

constexpr jinja::Limits kLimits{.steps = 20'000, .bytes = 1'000'000};

const jinja::Value& conversation() {
  static const auto value = jinja::from_json(nlohmann::ordered_json::parse(R"({
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"},
                 {"role": "assistant", "content": "2", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]}],
    "tools": null, "add_generation_prompt": true, "eos_token": "<|im_end|>"})"));
  return value;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const jinja::Template source(std::string(reinterpret_cast<const char*>(data), size), "fuzz.jinja");
    source.render(*conversation().dict(), kLimits, 0);
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
  }
  return 0;
}
