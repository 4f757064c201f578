// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/progress.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "sluice/core/log.h"
#include "sluice/core/terminal.h"

namespace sluice {
namespace {

using std::chrono::steady_clock;

constexpr auto kRedrawEvery = std::chrono::milliseconds(100);  // an eye sees no more; slow links carry no more
constexpr auto kLineEvery = std::chrono::seconds(10);
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// Three digits, which keep the line short and its columns in place: "0.83", "61.3", "412", "1.2e+04".
std::string three_digits(double number) {
  const double size = std::abs(number);
  if (size < 9.995) return fmt::format("{:.2f}", number);
  if (size < 99.95) return fmt::format("{:.1f}", number);
  if (size < 9999.5) return fmt::format("{:.0f}", number);
  return fmt::format("{:.1e}", number);
}

// "950", "48.1k", "1.20M".
std::string short_count(double count) {
  if (count < 999.5) return fmt::format("{:.0f}", count);
  if (count < 999.5e3) return three_digits(count / 1e3) + "k";
  return three_digits(count / 1e6) + "M";
}

// "0:11:05"; hours grow as they must.
std::string clock_time(double seconds) {
  const auto whole = std::llround(std::clamp(seconds, 0.0, 1e9));
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace

std::string format_step_line(const StepLine& line) {
  std::vector<std::string> fields{fmt::format("step {}/{}", line.step, line.steps)};
  if (line.loss) fields.push_back(fmt::format("loss {:.4f}", *line.loss));
  if (line.grad_norm) fields.push_back("gnorm " + three_digits(*line.grad_norm));
  fields.insert(fields.end(), line.further.begin(), line.further.end());
  if (line.lr) fields.push_back(fmt::format("lr {:.1e}", *line.lr));
  if (line.tokens_per_s) fields.push_back(short_count(*line.tokens_per_s) + " tok/s");
  if (line.mfu) fields.push_back(fmt::format("mfu {}%", three_digits(100 * *line.mfu)));
  if (line.memory_bytes) fields.push_back(three_digits(*line.memory_bytes / kGiB) + " GiB");
  if (line.step_s) fields.push_back(three_digits(*line.step_s) + " s");
  if (line.eta_s) fields.push_back("eta " + clock_time(*line.eta_s));
  return fmt::format("{}", fmt::join(fields, " | "));
}

Progress::~Progress() {
  if (!pending_.empty()) show_live_line(pending_);
  keep_live_line();
}

void Progress::step(const StepLine& line) {
  if (!log_shows(LogLevel::kInfo)) return;
  if (on_terminal()) {
    show_live(format_step_line(line));
  } else {
    log_info("{}", format_step_line(line));
  }
}

void Progress::update(std::string_view text) {
  if (!log_shows(LogLevel::kInfo)) return;
  if (on_terminal()) {
    show_live(text);
  } else if (const auto now = steady_clock::now(); now - last_shown_ >= kLineEvery) {
    last_shown_ = now;
    log_info("{}", text);
  }
}

void Progress::show_live(std::string_view text) {
  const auto now = steady_clock::now();
  if (now - last_shown_ < kRedrawEvery) {
    pending_ = text;
    return;
  }
  last_shown_ = now;
  pending_.clear();
  show_live_line(text);
}

}  // namespace sluice
