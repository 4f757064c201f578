// SPDX-License-Identifier: Apache-2.0
// Exchanges between GPUs, through NCCL and by their copy engines. In the CUDA library, which the program loads where it
// uses a GPU.
#define USE_C10D_NCCL  // as libtorch was built; its header is empty without
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "sluice/core/error.h"
#include "sluice/parallel/peer_copies.h"

namespace sluice {
namespace {

void check(cudaError_t error, const char* what) {
  SLUICE_CHECK(error == cudaSuccess, "parallel: {}: {}", what, cudaGetErrorString(error));
}

// Writes to a word of memory, and waits for one, in the order of a stream and without a multiprocessor.
using StreamWord = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

StreamWord stream_word(const char* name) {
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW);
  auto* const found = driver == nullptr ? nullptr : ::dlsym(driver, name);
  SLUICE_CHECK(found != nullptr, "parallel: the driver of the GPU has no {}", name);
  return reinterpret_cast<StreamWord>(found);
}

// Memory of one member, which the others map: words, then a slot for each other's message. ready(i) counts the messages
// that member i has put into its slot here, taken(i) those of the owner's that i has taken from its slot there.
struct Region {
  std::byte* begin = nullptr;
  std::int64_t owner = 0, members = 0;
  std::size_t room = 0;

  static constexpr std::int64_t kWords = 4096;  // bytes
  std::size_t bytes() const { return kWords + static_cast<std::size_t>(members - 1) * room; }
  CUdeviceptr ready(std::int64_t i) const { return reinterpret_cast<CUdeviceptr>(begin + 8 * i); }
  CUdeviceptr taken(std::int64_t i) const { return reinterpret_cast<CUdeviceptr>(begin + 8 * i + 4); }
  std::byte* slot(std::int64_t i) const { return begin + kWords + static_cast<std::size_t>(i - (i > owner)) * room; }
};

// The memory goes with the process: freeing it would wait for streams, and those perhaps for a member that is gone.
class CopyEngines : public PeerCopies {
 public:
  CopyEngines(std::int64_t rank, std::int64_t size, at::Device device)
      : rank_(rank),
        size_(size),
        device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())),
        regions_(static_cast<std::size_t>(size)),
        sent_(static_cast<std::size_t>(size)),
        received_(static_cast<std::size_t>(size)) {
    SLUICE_CHECK(8 * size <= Region::kWords, "parallel: {} GPUs of one machine share tensors; {} is the most", size,
                 Region::kWords / 8);
  }

  bool make_room(std::size_t bytes, const AllGather& all_gather) override {
    if (bytes <= regions_[rank_].room) return true;
    const c10::cuda::CUDAGuard guard(device_);
    auto& own = regions_[rank_];
    if (own.begin != nullptr) {
      stream_.synchronize();
      all_gather({1});  // nobody writes any more to what is unmapped now
      for (std::int64_t i = 0; i < size_; ++i) {
        if (i != rank_) check(cudaIpcCloseMemHandle(regions_[i].begin), "unmapping another GPU's memory");
      }
      all_gather({1});  // nobody maps any more what is freed now
      check(cudaFree(own.begin), "freeing memory");
    }
    for (std::int64_t i = 0; i < size_; ++i) {
      regions_[i] = {.begin = nullptr, .owner = i, .members = size_, .room = (bytes + kUnit - 1) / kUnit * kUnit};
    }
    std::ranges::fill(sent_, 0);
    std::ranges::fill(received_, 0);
    void* memory = nullptr;
    if (cudaMalloc(&memory, own.bytes()) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      c10::cuda::CUDACachingAllocator::emptyCache();
      check(cudaMalloc(&memory, own.bytes()), "memory for what other GPUs send");
    }
    own.begin = static_cast<std::byte*>(memory);
    check(cudaMemset(own.begin, 0, Region::kWords), "clearing memory");
    check(cudaDeviceSynchronize(), "clearing memory");
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, own.begin), "sharing memory with other processes");
    Bytes mine(sizeof(handle));
    std::memcpy(mine.data(), &handle, sizeof(handle));
    const auto handles = all_gather(mine);
    for (std::int64_t i = 0; i < size_; ++i) {
      if (i == rank_) continue;
      std::memcpy(&handle, handles[i].data(), sizeof(handle));
      const auto error = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
      static_cast<void>(cudaGetLastError());
      if (error != cudaSuccess) return false;
      regions_[i].begin = static_cast<std::byte*>(memory);
      if (write_(stream_.stream(), regions_[i].ready(rank_), 0, CU_STREAM_WRITE_VALUE_DEFAULT) != CUDA_SUCCESS) {
        return false;
      }
    }
    return true;
  }

  std::function<void()> start_swap(const Tensor& x, std::int64_t to, const Tensor& into, std::int64_t from) override {
    const c10::cuda::CUDAGuard guard(device_);
    at::cuda::CUDAEvent begun, done;
    begun.record();
    begun.block(stream_);
    const auto& own = regions_[rank_];
    // The slot there is free once all messages before have been taken.
    const auto message = ++sent_[to];
    wait_for(own.taken(to), message - 1);
    copy(regions_[to].slot(rank_), x.const_data_ptr(), x.nbytes());
    write(regions_[to].ready(rank_), message);
    const auto expected = ++received_[from];
    wait_for(own.ready(from), expected);
    copy(into.mutable_data_ptr(), own.slot(from), into.nbytes());
    write(regions_[from].taken(rank_), expected);
    done.record(stream_);
    return [done = std::make_shared<at::cuda::CUDAEvent>(std::move(done))] {
      done->block(c10::cuda::getCurrentCUDAStream(done->device_index()));
    };
  }

 private:
  static constexpr std::size_t kUnit = 1 << 24;  // so that packs of nearly the same length take no new memory

  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.stream()), "a copy between GPUs");
  }
  void write(CUdeviceptr word, std::uint32_t value) {
    SLUICE_CHECK(write_(stream_.stream(), word, value, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS,
                 "parallel: a stream cannot write to another GPU's memory");
  }
  void wait_for(CUdeviceptr word, std::uint32_t value) {
    SLUICE_CHECK(wait_(stream_.stream(), word, value, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS,
                 "parallel: a stream cannot wait for another GPU");
  }

  std::int64_t rank_, size_;
  at::Device device_;
  c10::cuda::CUDAStream stream_;
  StreamWord write_ = stream_word("cuStreamWriteValue32_v2"), wait_ = stream_word("cuStreamWaitValue32_v2");
  std::vector<Region> regions_;                 // by member
  std::vector<std::uint32_t> sent_, received_;  // messages to and from each
};

}  // namespace
}  // namespace sluice

// Found by name (parallel/communicator.cpp). The caller owns what comes back.
extern "C" c10d::Backend* sluice_new_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::milliseconds timeout, at::Device device) {
  // c10d's watchdog would wait a minute before it ends the process, for records of exchanges that nobody keeps.
  for (const auto* wait : {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}) ::setenv(wait, "0", 0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  backend->setBoundDeviceId(device);
  return backend.release();
}

extern "C" sluice::PeerCopies* sluice_new_peer_copies(int rank, int size, at::Device device) {
  return new sluice::CopyEngines(rank, size, device);
}
