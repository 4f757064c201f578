// SPDX-License-Identifier: Apache-2.0
// What a group of several processes exchanges tensors with: c10d's Gloo for tensors on the CPU, NCCL for those on a
// GPU.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

#include "sluice/parallel/world.h"

namespace sluice {

class Communicator {
 public:
  // Connects to the other members, who make it at the same time. `ranks` of the world rise; `purpose` tells apart
  // groups of the same ranks.
  Communicator(const World& world, std::vector<std::int64_t> ranks, const std::string& purpose);

  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return static_cast<std::int64_t>(ranks_.size()); }

  // Starts an exchange on tensors of `device`, and waits for one: on a GPU its stream waits, not the host. The tensors
  // must live until then. An error says which exchange failed and who is to blame.
  using Exchange = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& backend)>;
  c10::intrusive_ptr<c10d::Work> start(const char* name, at::Device device, const Exchange& exchange) const;
  void wait(const char* name, c10d::Work& exchange) const;

 private:
  const World& world_;
  std::vector<std::int64_t> ranks_;
  std::int64_t rank_;                            // in the group
  c10::intrusive_ptr<c10d::Backend> cpu_, gpu_;  // the second where the world's device is a GPU
};

}  // namespace sluice
