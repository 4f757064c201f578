// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/communicator.h"

#define USE_C10D_GLOO  // as libtorch was built; its header is empty without
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>

namespace sluice {

Communicator::Communicator(const World& world, std::vector<std::int64_t> ranks)
    : world_(world), ranks_(std::move(ranks)), rank_(std::ranges::find(ranks_, world.rank()) - ranks_.begin()) {
  const auto name = fmt::format("group/{}", fmt::join(ranks_, ","));
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, world.store());
  const auto options = c10d::ProcessGroupGloo::Options::create(world.timeout());
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  try {
    cpu_ =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store, static_cast<int>(rank_), static_cast<int>(size()), options);
  } catch (const std::exception& error) {
    world_.fail_exchange("connecting", ranks_, error.what());
  }
}

void Communicator::run(const char* name, at::Device device, const Exchange& exchange) const {
  try {
    exchange(device.is_cpu() ? *cpu_ : *gpu_)->wait();
  } catch (const std::exception& error) {
    world_.fail_exchange(name, ranks_, error.what());
  }
}

}  // namespace sluice
