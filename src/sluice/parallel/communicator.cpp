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
#include <fstream>
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
template <typename Function>
Function* from_cuda_library(const char* name) {
  const auto found = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
  SLUICE_CHECK(found != nullptr,
               "parallel: libsluice_cuda.so is not loaded, or is of another version.\n  Build it anew.");
  return found;
}

c10::intrusive_ptr<c10d::Backend> new_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   const World& world) {
  using New = c10d::Backend*(const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds, at::Device);
  const auto make = from_cuda_library<New>("sluice_new_nccl_backend");
  world_on_gpus = &world;
  std::set_terminate(end_for_failed_exchange);
  return c10::intrusive_ptr<c10d::Backend>::reclaim(make(store, rank, size, world.timeout(), world.device()));
}

// Differs between machines, and between their starts.
PeerCopies::Bytes machine() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return {id.begin(), id.end()};
}

}  // namespace

Communicator::Communicator(const World& world, std::vector<std::int64_t> ranks, const std::string& purpose)
    : world_(world),
      ranks_(std::move(ranks)),
      rank_(std::ranges::find(ranks_, world.rank()) - ranks_.begin()),
      store_(c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}/{}", purpose, fmt::join(ranks_, ",")),
                                                    world.store())) {
  const auto options = c10d::ProcessGroupGloo::Options::create(world.timeout());
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  const auto rank = static_cast<int>(rank_), members = static_cast<int>(ranks_.size());
  try {
    cpu_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store_, rank, members, options);
    if (world_.device().is_cuda()) {
      gpu_ = new_nccl_backend(c10::make_intrusive<c10d::PrefixStore>("nccl", store_), rank, members, world_);
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

std::vector<PeerCopies::Bytes> Communicator::share(const PeerCopies::Bytes& own) const {
  const auto key = [number = shared_++](std::int64_t rank) { return fmt::format("shared/{}/{}", number, rank); };
  std::vector<PeerCopies::Bytes> all;
  try {
    store_->set(key(rank_), own);
    for (std::int64_t rank = 0; rank < size(); ++rank) all.push_back(store_->get(key(rank)));
  } catch (const std::exception& error) {
    world_.fail_exchange("sharing memory", ranks_, error.what());
  }
  return all;
}

// Null where a GPU cannot reach another's memory; the same on all members.
PeerCopies* Communicator::copies_for(std::size_t most) const {
  const auto are_equal = [](const std::vector<PeerCopies::Bytes>& all) {
    return std::ranges::all_of(all, [&](const auto& its) { return its == all[0]; });
  };
  if (!has_tried_copies_ && are_equal(share(machine()))) {
    const auto make = from_cuda_library<PeerCopies*(int, int, at::Device)>("sluice_new_peer_copies");
    copies_.reset(make(static_cast<int>(rank_), static_cast<int>(size()), world_.device()));
  }
  has_tried_copies_ = true;
  if (copies_ == nullptr || most <= room_) return copies_.get();
  const bool reaches = copies_->make_room(most, [&](const auto& own) { return share(own); });
  room_ = most;
  const auto all = share({static_cast<std::uint8_t>(reaches)});
  if (std::ranges::any_of(all, [](const auto& its) { return its[0] == 0; })) copies_.reset();
  return copies_.get();
}

std::function<void()> Communicator::start_swap(const Tensor& x, std::int64_t to, const Tensor& into, std::int64_t from,
                                               std::size_t most) const {
  if (!x.device().is_cpu()) {
    if (auto* copies = copies_for(most)) return copies->start_swap(x, to, into, from);
  }
  constexpr auto kName = "swap";
  std::vector<std::int64_t> sent(ranks_.size()), received(ranks_.size());
  sent[static_cast<std::size_t>(to)] = x.size(0);
  received[static_cast<std::size_t>(from)] = into.size(0);
  auto work = start(kName, x.device(), [&](c10d::Backend& backend) {
    auto in = x, out = into;
    return backend.alltoall_base(out, in, received, sent);
  });
  return [this, x, into, work = std::move(work)] { wait(kName, *work); };
}

}  // namespace sluice
