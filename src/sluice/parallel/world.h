// SPDX-License-Identifier: Apache-2.0
// All processes of a run: how they meet, agree on what they run, and end together.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/parallel/launch.h"

namespace sluice {

// The processes meet at a store that rank 0 keeps (c10d's TCPStore); what they exchange later does not pass through it.
// Outlives the groups that are made of it.
class World {
 public:
  World() = default;  // one process

  // Waits until all processes are there. After `timeout`, here and in every later exchange, an error says who is
  // missing. The processes exchange tensors on the CPU (Gloo) and, where `device` is a GPU, on it (NCCL).
  World(const Launch& launch, std::chrono::milliseconds timeout, at::Device device = at::kCPU);
  ~World();  // where this process keeps the store: waits a little for those that may still look into it
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }
  at::Device device() const { return device_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }  // none: one process

  // Compares named facts with those of rank 0: the program's version, settings. Where a rank has others, the first
  // difference ends every rank with the same usage error. All ranks call it.
  using Facts = std::vector<std::pair<std::string, std::string>>;
  void agree(const Facts& facts) const;

  // Leaves a word for the others, beside all exchanges: from any thread, and without waiting. Of one name the first
  // stays.
  void post(const std::string& name, const std::string& text) const;
  // What was posted under the first of `names` that is there. Waits for it, and ends with an error after the timeout,
  // or when a process notes that it fails.
  std::string await(const std::vector<std::string>& names) const;

  // Tells the others why this process ends, before it does. Only the first such note is kept.
  void note_failure(const std::string& reason) const noexcept;

  // Ends this process's part in an exchange among `ranks` that failed with `error`: throws an error that names the
  // rank to blame, as far as the store or the others' waiting tells.
  [[noreturn]] void fail_exchange(const std::string& exchange, const std::vector<std::int64_t>& ranks,
                                  const std::string& error) const;

 private:
  std::string wait_for_all() const;
  std::string first_difference(const Facts& facts) const;
  std::vector<std::int64_t> all_ranks() const;
  void leave() const noexcept;

  c10::intrusive_ptr<c10d::Store> store_;
  bool keeps_store_ = false;
  std::int64_t rank_ = 0, size_ = 1;
  std::chrono::milliseconds timeout_{0};
  at::Device device_ = at::kCPU;
};

}  // namespace sluice
