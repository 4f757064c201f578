// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <set>
#include <string>

#include "sluice/core/terminal.h"

namespace sluice {
namespace {

spdlog::logger& logger() {
  static const auto instance = [] {
    auto created = spdlog::stderr_logger_mt("sluice");
    created->set_pattern("%v");
    created->set_level(spdlog::level::info);
    return created;
  }();
  return *instance;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kNothing:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

}  // namespace

void set_log_level(LogLevel lowest_shown) { logger().set_level(to_spdlog(lowest_shown)); }

bool log_shows(LogLevel level) { return logger().should_log(to_spdlog(level)); }

void log_line(LogLevel level, std::string_view line) {
  const LinesAboveLiveLine above;
  if (level == LogLevel::kWarning) {
    logger().warn("{} {}", colours_wanted() ? "\x1b[33mwarning:\x1b[0m" : "warning:", line);
  } else {
    logger().info("{}", line);
  }
}

bool first_time(std::string_view key) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> seen;
  const std::lock_guard lock(mutex);
  return seen.emplace(key).second;
}

}  // namespace sluice
