// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cassert>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace sluice {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGUSR1};
constexpr std::int64_t kSameRequestMs = 1000;

std::atomic<int> first_signal{0};
std::atomic<std::int64_t> first_time_ms{0};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free,
              "a signal handler may touch lock-free atomics alone");

std::array<struct sigaction, kSignals.size()> previous_actions;
bool installed = false;

std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

void on_signal(int signal) {
  int expected = 0;
  if (first_signal == 0) first_time_ms = now_ms();
  if (first_signal.compare_exchange_strong(expected, signal)) return;
  const bool passed_on = signal != expected && now_ms() - first_time_ms < kSameRequestMs;
  if (!passed_on) ::_exit(128 + signal);
}

}  // namespace

StopSignals::StopSignals() {
  assert(!installed);
  installed = true;
  first_signal = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // reads and writes of libraries go on
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &previous_actions[i]);
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &previous_actions[i], nullptr);
  installed = false;
}

int StopSignals::signal() const { return first_signal; }

}  // namespace sluice
