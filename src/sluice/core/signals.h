// SPDX-License-Identifier: Apache-2.0
// Ending a long run on request. SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (a scheduler's warning) ask for a stop: the run
// finishes its step, saves and ends. A second signal ends the process at once with status 128 + signal (130, 143).
#pragma once

namespace sluice {

// Catches the signals while it lives; one at a time. Commands without it end at the first signal, as programs do.
//
// A launcher passes a terminal's Ctrl-C on as SIGTERM although the terminal sent SIGINT to everybody: a second signal
// of another kind within a second is the same request.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool requested() const { return signal() != 0; }
  int signal() const;  // the signal that asked for a stop; 0: none so far
};

}  // namespace sluice
