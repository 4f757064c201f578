// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>

#include "sluice/kernels/common/recorded_work.h"

namespace sluice {
namespace {

// What is recorded takes as much memory again as the work has just left in the allocator's cache, and nothing can be
// freed meanwhile.
void make_room(c10::DeviceIndex device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device);
  const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto cached = stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
  std::size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (static_cast<std::int64_t>(free) < cached) c10::cuda::CUDACachingAllocator::emptyCache();
}

class Graph : public RecordedWork {
 public:
  Graph(at::Device device, const std::function<void()>& work, Graph* beside)
      : own_(beside != nullptr ? beside->own_
                               : c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {
    const auto outer = c10::cuda::getCurrentCUDAStream(device.index());
    const auto wait = [](const c10::cuda::CUDAStream& waiting, const c10::cuda::CUDAStream& other) {
      at::cuda::CUDAEvent done;
      done.record(other);
      done.block(waiting);
    };
    wait(own_, outer);
    {
      const c10::cuda::CUDAStreamGuard stream(own_);
      work();
      make_room(device.index());
      graph_.capture_begin(beside != nullptr ? beside->graph_.pool() : c10::MempoolId_t{0, 0},
                           cudaStreamCaptureModeThreadLocal);
      capture(work);
    }
    wait(outer, own_);
  }

  void replay() override { graph_.replay(); }

 private:
  // Work that throws, out of memory for one, has the capture ended too: ~CUDAGraph() ends none, and all that is
  // destroyed on the way up would find the stream still capturing, and the allocator asking a graph that is gone which
  // streams are its own.
  void capture(const std::function<void()>& work) {
    try {
      work();
    } catch (...) {
      try {
        graph_.capture_end();
      } catch (const std::exception&) {  // of half the work; what the work threw says why
      }
      throw;
    }
    graph_.capture_end();
  }

  c10::cuda::CUDAStream own_;  // recorded on another than the current one, whose memory is that of the stream
  at::cuda::CUDAGraph graph_;
};

}  // namespace
}  // namespace sluice

// Found by name (recorded_work.cpp). The caller owns what comes back.
extern "C" sluice::RecordedWork* sluice_record_work(at::Device device, const std::function<void()>& work,
                                                    sluice::RecordedWork* beside) {
  return new sluice::Graph(device, work, static_cast<sluice::Graph*>(beside));
}
