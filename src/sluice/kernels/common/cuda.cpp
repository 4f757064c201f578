// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "sluice/kernels/common/recorded_work.h"

namespace sluice {
namespace {

class Graph : public RecordedWork {
 public:
  Graph(at::Device device, const std::function<void()>& work) {
    const auto outer = c10::cuda::getCurrentCUDAStream(device.index());
    const auto own = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());  // recorded on another
    const auto wait = [](const c10::cuda::CUDAStream& waiting, const c10::cuda::CUDAStream& other) {
      at::cuda::CUDAEvent done;
      done.record(other);
      done.block(waiting);
    };
    wait(own, outer);
    {
      const c10::cuda::CUDAStreamGuard stream(own);
      work();
      graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      work();
      graph_.capture_end();
    }
    wait(outer, own);
  }

  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace
}  // namespace sluice

// Found by name (recorded_work.cpp). The caller owns what comes back.
extern "C" sluice::RecordedWork* sluice_record_work(at::Device device, const std::function<void()>& work) {
  return new sluice::Graph(device, work);
}
