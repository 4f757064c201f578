// SPDX-License-Identifier: Apache-2.0
// The device that a command computes on. The program starts without any CUDA library; libtorch's and our own are loaded
// when a GPU is first used.
#pragma once

#include <cstdint>
#include <string>

#include "sluice/core/tensor.h"

namespace sluice {

enum class DeviceChoice { kAuto, kCpu, kCuda };  // as the option names them

struct ComputeDevice {
  at::Device device = at::kCPU;
  std::string name;  // of a GPU, as its driver spells it: "NVIDIA H200"
};

// kCuda: GPU `index` of those that CUDA_VISIBLE_DEVICES leaves, or the only one, or a usage error that says what is
// missing: a driver, a GPU of compute capability 9.0 (Hopper: H100, H200), libtorch_cuda.so beside the libtorch that
// runs, or libsluice_cuda.so beside the program. kAuto: the same GPU, or the CPU where it cannot be used; where there
// is a GPU the log says which of both, and why.
ComputeDevice open_device(DeviceChoice choice, std::int64_t index = 0);

// True where a driver shows an NVIDIA GPU of any kind.
bool has_gpu();

// The most memory held at once, in bytes: of the GPU by its tensors, or of this process on the CPU.
std::int64_t peak_memory_bytes(at::Device device);

}  // namespace sluice
