// SPDX-License-Identifier: Apache-2.0
// Lines for people on standard error. `--quiet` leaves warnings alone; of several processes that run one command, all
// but the first say nothing.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace sluice {

enum class LogLevel { kInfo, kWarning, kNothing };

void set_log_level(LogLevel lowest_shown);
bool log_shows(LogLevel level);
void log_line(LogLevel level, std::string_view line);

// True the first time that `key` is seen in this process. For a slower path that says so once.
bool first_time(std::string_view key);

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_once(fmt::format_string<Args...> format, Args&&... args) {
  const auto line = fmt::format(format, std::forward<Args>(args)...);
  if (first_time(line)) log_line(LogLevel::kWarning, line);
}

}  // namespace sluice
