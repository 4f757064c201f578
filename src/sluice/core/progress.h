// SPDX-License-Identifier: Apache-2.0
// How far long work is. On a terminal one live line, redrawn; elsewhere plain lines. `--quiet` shows nothing. Goes to
// standard error.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// One training step for people. What is not known is left out of the line.
struct StepLine {
  std::int64_t step = 0;   // counts from 1
  std::int64_t steps = 0;  // of the whole run
  std::optional<double> loss = {};
  std::optional<double> grad_norm = {};   // before clipping
  std::vector<std::string> further = {};  // other fields as they shall stand: "reward 0.53"
  std::optional<double> lr = {};
  std::optional<double> tokens_per_s = {};
  std::optional<double> mfu = {};  // model FLOP utilisation, 1 is the peak
  std::optional<double> memory_bytes = {};
  std::optional<double> step_s = {};
  std::optional<double> eta_s = {};  // time left
};

// "step 12/500 | loss 1.2345 | gnorm 0.83 | lr 9.6e-06 | 48.1k tok/s | mfu 41.2% | 61.3 GiB | 1.36 s | eta 0:11:05"
std::string format_step_line(const StepLine& line);

class Progress {
 public:
  Progress() = default;
  ~Progress();  // leaves the last line standing
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // After each step: in a file every step has its line.
  void step(const StepLine& line);

  // Other long work, such as "loading: 12 of 41 shards". May be called often: in a file a line stands every 10 s.
  void update(std::string_view text);

 private:
  void show_live(std::string_view text);

  std::chrono::steady_clock::time_point last_shown_ = {};
  std::string pending_;  // the newest live line, if it was too early to draw it
};

}  // namespace sluice
