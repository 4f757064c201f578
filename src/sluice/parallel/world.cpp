// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/world.h"

#include <c10/util/Logging.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <thread>

#include "sluice/core/error.h"

namespace sluice {
namespace {

// Keys of the store.
constexpr auto kFailure = "failure";                  // the first rank's that failed, and why
constexpr auto kArrived = "arrived", kLeft = "left";  // how many processes came and went

// How long rank 0 stays for the others to read from its store why the run ends. It covers their wait for one another in
// fail_exchange().
constexpr std::chrono::seconds kFarewell{5}, kGrace{2};

std::string key(const char* what, std::int64_t rank) { return fmt::format("{}/{}", what, rank); }

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// Those whose key is not there.
std::vector<std::int64_t> silent_ranks(c10d::Store& store, const char* what, const std::vector<std::int64_t>& ranks) {
  std::vector<std::int64_t> silent;
  for (const auto rank : ranks) {
    if (!store.check({key(what, rank)})) silent.push_back(rank);
  }
  return silent;
}

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1e3; }

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

World::World(const Launch& launch, std::chrono::milliseconds timeout, at::Device device)
    : rank_(launch.rank), size_(launch.size), timeout_(timeout), device_(device) {
  if (size_ == 1) return;
  std::signal(SIGPIPE, SIG_IGN);  // a process that died is an error of write(), not our end
  const auto place = fmt::format("{}:{}", launch.address, launch.port);
  keeps_store_ = rank_ == 0 && !launch.has_store;
  // What c10d would print of a failure, we say ourselves.
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  try {
    store_ = c10::make_intrusive<c10d::TCPStore>(
        launch.address,
        c10d::TCPStoreOptions{.port = launch.port, .isServer = keeps_store_, .waitWorkers = false, .timeout = timeout});
  } catch (const std::exception& error) {
    if (keeps_store_) {
      fail_usage("parallel: rank 0 cannot open {} for the others to meet: {}.\n  Choose another MASTER_PORT.", place,
                 first_line(error.what()));
    }
    fail(ExitCode::kRuntime,
         "parallel: rank {} found nobody at {} (MASTER_ADDR:MASTER_PORT) within {:g} s.\n"
         "  Rank 0 did not start, or the address is not its machine's.",
         rank_, place, seconds(timeout));
  }
  store_->set(key("here", rank_), std::vector<std::uint8_t>{1});
  store_->add(kArrived, 1);
  if (const auto missing = wait_for_all(); !missing.empty()) {
    leave();
    fail(ExitCode::kRuntime,
         "parallel: of {} processes these did not start within {:g} s (parallel.timeout): rank {}.\n"
         "  Their own output says why; all must run with the same MASTER_ADDR and MASTER_PORT.",
         size_, seconds(timeout), missing);
  }
}

// Empty, or who is missing, as whoever waited first for the whole time wrote it down.
std::string World::wait_for_all() const {
  constexpr auto kMissing = "missing";
  std::vector<std::string> keys;
  for (const auto rank : all_ranks()) keys.push_back(key("here", rank));
  const auto end = std::chrono::steady_clock::now() + timeout_;
  while (true) {
    try {
      store_->wait(keys, std::min<std::chrono::milliseconds>(timeout_, std::chrono::seconds(1)));
      return "";
    } catch (const std::exception&) {  // not yet
    }
    const bool is_late = std::chrono::steady_clock::now() >= end;
    if (!is_late && !store_->check({kMissing})) continue;
    const auto silent = fmt::format("{}", fmt::join(silent_ranks(*store_, "here", all_ranks()), ", "));
    return text_of(store_->compareSet(kMissing, {}, bytes_of(silent)));
  }
}

std::vector<std::int64_t> World::all_ranks() const {
  std::vector<std::int64_t> ranks(size_);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void World::leave() const noexcept {
  try {
    auto left = store_->add(kLeft, 1);
    const auto end = std::chrono::steady_clock::now() + std::min<std::chrono::milliseconds>(timeout_, kFarewell);
    while (keeps_store_ && left < store_->add(kArrived, 0) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      left = store_->add(kLeft, 0);
    }
  } catch (const std::exception&) {  // the keeper is gone already
  }
}

World::~World() {
  if (size_ > 1) leave();
}

// Empty, or the first difference that a rank found.
std::string World::first_difference(const Facts& facts) const {
  constexpr auto kDifference = "difference", kCompared = "compared", kDone = "all compared";
  std::string own;
  for (const auto& [name, value] : facts) own += name + '\n' + value + '\n';
  store_->set(key("facts", rank_), bytes_of(own));
  const auto first = text_of(store_->get(key("facts", 0)));
  if (own != first) {
    std::istringstream lines(first);
    std::string name, value, difference = "settings that rank 0 has and it has not";
    for (const auto& [own_name, own_value] : facts) {
      const bool is_there = std::getline(lines, name) && std::getline(lines, value);
      if (is_there && name == own_name && value == own_value) continue;
      difference = is_there && name == own_name ? fmt::format("{}: {} against {} on rank 0", name, own_value, value)
                                                : fmt::format("{}: {}, which rank 0 has not", own_name, own_value);
      break;
    }
    store_->compareSet(kDifference, {}, bytes_of(fmt::format("rank {} has {}", rank_, difference)));
  }
  if (store_->add(kCompared, 1) == size_) store_->set(kDone, std::vector<std::uint8_t>{1});
  store_->wait({kDone}, timeout_);
  return store_->check({kDifference}) ? text_of(store_->get(kDifference)) : "";
}

void World::agree(const Facts& facts) const {
  if (size_ == 1) return;
  std::string difference;
  try {
    difference = first_difference(facts);
  } catch (const std::exception& error) {
    fail_exchange("comparing settings", all_ranks(), error.what());
  }
  if (difference.empty()) return;
  fail_usage("parallel: the processes do not run the same: {}.\n  Start all with the same program and settings.",
             difference);
}

void World::post(const std::string& name, const std::string& text) const {
  store_->compareSet(name, {}, bytes_of(text));
}

// By looking again and again: a wait within the store would keep other threads from it.
std::string World::await(const std::vector<std::string>& names) const {
  constexpr std::chrono::milliseconds kPause{20};
  const auto end = std::chrono::steady_clock::now() + timeout_;
  while (std::chrono::steady_clock::now() < end) {
    for (const auto& name : names) {
      if (store_->check({name})) return text_of(store_->get(name));
    }
    if (store_->check({kFailure})) {
      fail(ExitCode::kRuntime, "parallel: rank {}: stopped after {}", rank_, text_of(store_->get(kFailure)));
    }
    std::this_thread::sleep_for(kPause);
  }
  fail(ExitCode::kRuntime, "parallel: rank {} waited {:g} s (parallel.timeout) for the {} of another process in vain.",
       rank_, seconds(timeout_), names[0]);
}

void World::note_failure(const std::string& reason) const noexcept {
  if (size_ == 1) return;
  try {
    store_->compareSet(kFailure, {}, bytes_of(fmt::format("rank {}: {}", rank_, first_line(reason))));
  } catch (const std::exception&) {  // rank 0 is gone, and the store with it: the others see that themselves
  }
}

void World::fail_exchange(const std::string& exchange, const std::vector<std::int64_t>& ranks,
                          const std::string& error) const {
  const auto where = fmt::format("parallel: rank {}, {} among ranks {}", rank_, exchange, fmt::join(ranks, ", "));
  std::string first;  // who failed first, and why
  std::vector<std::int64_t> silent;
  try {
    // Whoever fails says so before its connections close.
    if (!store_->check({kFailure})) {
      store_->set(key("stopped", rank_), std::vector<std::uint8_t>{1});
      std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(timeout_ / 4, kGrace));
      silent = silent_ranks(*store_, "stopped", ranks);
    }
    const auto own = fmt::format("rank {}: {}", rank_, first_line(error));
    first = text_of(store_->compareSet(kFailure, {}, bytes_of(own)));
    if (first == own) first.clear();
  } catch (const std::exception&) {
    fail(ExitCode::kRuntime, "{}: rank 0 is gone.\n  Its own output says why.", where);
  }
  if (!first.empty()) fail(ExitCode::kRuntime, "{}: stopped after {}", where, first);
  fail(ExitCode::kRuntime, "{}: {}.\n  {}", where, first_line(error),
       silent.empty() ? "All of them are there."
                      : fmt::format("No word from rank {}: died, or busy for longer than {:g} s (parallel.timeout).",
                                    fmt::join(silent, ", "), seconds(timeout_)));
}

}  // namespace sluice
