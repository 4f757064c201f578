// SPDX-License-Identifier: Apache-2.0
// Standard error as a person sees it: lines that scroll by and, on a terminal, at most one live line below them that is
// redrawn in place.
#pragma once

#include <unistd.h>

#include <mutex>
#include <string_view>

namespace sluice {

// Standard error, or another descriptor, goes to a terminal that can redraw a line.
bool on_terminal(int descriptor = STDERR_FILENO);

// A terminal, and the environment does not set NO_COLOR (https://no-color.org).
bool colours_wanted(int descriptor = STDERR_FILENO);

// Draws `text` as the live line, cut to the width of the terminal. Without a terminal: nothing.
void show_live_line(std::string_view text);

// Leaves the live line standing where it is and goes below it.
void keep_live_line();

// Takes the live line away while other lines are written to standard error, and puts it back below them.
class LinesAboveLiveLine {
 public:
  LinesAboveLiveLine();
  ~LinesAboveLiveLine();
  LinesAboveLiveLine(const LinesAboveLiveLine&) = delete;
  LinesAboveLiveLine& operator=(const LinesAboveLiveLine&) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
};

}  // namespace sluice
