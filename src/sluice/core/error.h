// SPDX-License-Identifier: Apache-2.0
// Errors for people. A message says what failed and where, what was expected, what was found and what to do; the kind
// decides the exit code of the program (docs/cli.md). Check at the border (command line, file, operator entry), trust
// inside.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace sluice {

enum class ExitCode : int {
  kDone = 0,
  kRuntime = 1,   // anything that is none of the others
  kUsage = 2,     // bad option, configuration or argument
  kData = 3,      // bad data, model folder or checkpoint
  kMemory = 4,    // out of memory
  kNan = 5,       // a loss that is not finite
  kRequeue = 75,  // stopped on request, with a checkpoint to resume from
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

template <typename... Args>
[[noreturn]] void fail(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
[[noreturn]] void fail_usage(fmt::format_string<Args...> format, Args&&... args) {
  fail(ExitCode::kUsage, format, std::forward<Args>(args)...);
}
template <typename... Args>
[[noreturn]] void fail_data(fmt::format_string<Args...> format, Args&&... args) {
  fail(ExitCode::kData, format, std::forward<Args>(args)...);
}

}  // namespace sluice

// A caller's mistake at an operator's entry. Our own mistakes are `assert`s.
#define SLUICE_CHECK(condition, ...)                                             \
  do {                                                                           \
    if (!(condition)) ::sluice::fail(::sluice::ExitCode::kRuntime, __VA_ARGS__); \
  } while (false)
