// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/communicator.h"

#define USE_C10D_GLOO  // as libtorch was built; its header is empty without
#include <dlfcn.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>

#include "sluice/core/error.h"

namespace sluice {
namespace {

// NCCL's exchanges run on behind the program's back: c10d's watchdog finds one that failed or took too long, and throws
// on a thread of its own, where nobody can catch. The process ends there, with the error of any other exchange.
const World* world_on_gpus = nullptr;

[[noreturn]] void end_for_failed_exchange() {
  std::string reason = "unknown";
  try {
    if (const auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& known) {
    reason = known.what();
  } catch (...) {  // nothing that says more
  }
  std::vector<std::int64_t> all(static_cast<std::size_t>(world_on_gpus->size()));
  std::iota(all.begin(), all.end(), 0);
  try {
    world_on_gpus->fail_exchange("exchange between GPUs", all, reason);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  std::_Exit(static_cast<int>(ExitCode::kRuntime));
}

// Of the CUDA library (parallel/cuda.cpp), which is loaded where the device is a GPU.
c10::intrusive_ptr<c10d::Backend> new_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   const World& world) {
  using New =
      c10d::Backend* (*)(const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds, at::Device);
  const auto make = reinterpret_cast<New>(::dlsym(RTLD_DEFAULT, "sluice_new_nccl_backend"));
  SLUICE_CHECK(make != nullptr,
               "parallel: libsluice_cuda.so is not loaded, or is of another version.\n  Build it anew.");
  world_on_gpus = &world;
  std::set_terminate(end_for_failed_exchange);
  return c10::intrusive_ptr<c10d::Backend>::reclaim(make(store, rank, size, world.timeout(), world.device()));
}

}  // namespace

Communicator::Communicator(const World& world, std::vector<std::int64_t> ranks, const std::string& purpose)
    : world_(world), ranks_(std::move(ranks)), rank_(std::ranges::find(ranks_, world.rank()) - ranks_.begin()) {
  const auto name = fmt::format("{}/{}", purpose, fmt::join(ranks_, ","));
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, world.store());
  const auto options = c10d::ProcessGroupGloo::Options::create(world.timeout());
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  const auto rank = static_cast<int>(rank_), members = static_cast<int>(ranks_.size());
  try {
    cpu_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, members, options);
    if (world_.device().is_cuda()) {
      gpu_ = new_nccl_backend(c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, members, world_);
    }
  } catch (const std::exception& error) {
    world_.fail_exchange("connecting", ranks_, error.what());
  }
}

c10::intrusive_ptr<c10d::Work> Communicator::start(const char* name, at::Device device,
                                                   const Exchange& exchange) const {
  try {
    return exchange(device.is_cpu() ? *cpu_ : *gpu_);
  } catch (const std::exception& error) {
    world_.fail_exchange(name, ranks_, error.what());
  }
}

void Communicator::wait(const char* name, c10d::Work& exchange) const {
  try {
    exchange.wait();
  } catch (const std::exception& error) {
    world_.fail_exchange(name, ranks_, error.what());
  }
}

}  // namespace sluice
