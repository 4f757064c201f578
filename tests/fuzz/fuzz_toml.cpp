// SPDX-License-Identifier: Apache-2.0
// Any text is a run file or a usage error, and so is any array on the command line.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "sluice/config/example_options.h"
#include "sluice/config/toml_reader.h"
#include "sluice/core/error.h"

namespace {

using namespace sluice;

template <typename Action>
void usage_error_or_done(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    if (error.code() != ExitCode::kUsage) throw;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  ExampleOptions options;
  OptionList list;
  options.describe(list);
  usage_error_or_done([&] { apply_toml(list, text, "fuzz.toml"); });
  for (const auto& option : list.options()) {
    if (option.count == ValueCount::kMany) usage_error_or_done([&] { apply_toml_array(option, text, "fuzz"); });
  }
  return 0;
}
