// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <optional>

#include "sluice/core/error.h"
#include "sluice/core/log.h"
#include "sluice/core/memory.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

struct Gpu {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  bool is_supported() const { return major == 9 && minor == 0; }
};

// GPU `index` of those that the driver shows, or the only one; none: no driver, or no GPU. Asks the driver alone, which
// takes milliseconds where loading libtorch's CUDA libraries takes seconds.
std::optional<Gpu> find_gpu(std::int64_t index) {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return std::nullopt;
  const auto call = [&]<typename... Args>(const char* name, Args... args) {
    const auto function = reinterpret_cast<int (*)(Args...)>(::dlsym(driver, name));
    return function != nullptr && function(args...) == 0;  // CUDA_SUCCESS
  };
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
  int count = 0, device = 0;
  std::array<char, 256> name{};
  Gpu gpu;
  if (!call("cuInit", 0U) || !call("cuDeviceGetCount", &count) || count == 0) return std::nullopt;
  if (count > 1 && index >= count) {
    fail_usage("device: process {} of this machine has no GPU: {} are visible.\n  Start at most as many processes.",
               index, count);
  }
  gpu.index = count == 1 ? 0 : static_cast<int>(index);
  const bool found = call("cuDeviceGet", &device, gpu.index) &&
                     call("cuDeviceGetName", name.data(), static_cast<int>(name.size()), device) &&
                     call("cuDeviceGetAttribute", &gpu.major, kMajor, device) &&
                     call("cuDeviceGetAttribute", &gpu.minor, kMinor, device);
  gpu.name = name.data();
  return found ? std::optional(gpu) : std::nullopt;
}

// Empty, or why the library cannot be loaded.
std::string load_library(const fs::path& path) {
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr ? std::string() : std::string(::dlerror());
}

// Empty, or what is missing. libtorch's library must be of the very build that runs, so it is taken from that folder.
std::string load_cuda_libraries() {
  Dl_info torch{};
  if (::dladdr(reinterpret_cast<const void*>(&at::globalContext), &torch) == 0) return "libtorch's folder is unknown";
  const auto from_torch = load_library(fs::path(torch.dli_fname).parent_path() / "libtorch_cuda.so");
  if (!from_torch.empty()) return from_torch + ".\n  This needs the CUDA build of libtorch (PyPI torch for CUDA 13)";
  const auto ours = load_library(fs::read_symlink("/proc/self/exe").parent_path() / "libsluice_cuda.so");
  if (!ours.empty()) return ours + ".\n  It is built where nvcc is, and lies beside the program";
  return at::globalContext().hasCUDA() ? "" : "libtorch finds no GPU that it can use";
}

// Empty, or why this GPU cannot be used. Loads what is needed.
std::string open_gpu(const Gpu& gpu) {
  if (!gpu.is_supported()) {
    return fmt::format("it has compute capability {}.{}, and the kernels are built for 9.0 alone (Hopper: H100, H200)",
                       gpu.major, gpu.minor);
  }
  if (auto missing = load_cuda_libraries(); !missing.empty()) return missing;
  at::globalContext().lazyInitDevice(at::kCUDA);
  at::accelerator::setDeviceIndex(static_cast<c10::DeviceIndex>(gpu.index));
  // Sums of split products stay in float32.
  at::globalContext().setAllowBF16ReductionCuBLAS(/*allow_reduced_precision=*/false);
  return "";
}

}  // namespace

bool has_gpu() { return find_gpu(0).has_value(); }

ComputeDevice open_device(DeviceChoice choice, std::int64_t index) {
  if (choice == DeviceChoice::kCpu) return {};
  const auto gpu = find_gpu(index);
  if (!gpu) {
    if (choice == DeviceChoice::kAuto) return {};
    fail_usage("device cuda: no GPU here, or no driver (libcuda.so.1) for it.\n  Run nvidia-smi, or take device cpu.");
  }
  const auto problem = open_gpu(*gpu);
  if (problem.empty()) {
    log_info("device: {}", gpu->name);
    return {.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu->index)), .name = gpu->name};
  }
  if (choice == DeviceChoice::kCuda) fail_usage("device cuda: {} cannot be used: {}.", gpu->name, problem);
  log_warning("device: the CPU; {} cannot be used: {}.", gpu->name, problem);
  return {};
}

std::int64_t peak_memory_bytes(at::Device device) {
  if (device.is_cpu()) return peak_memory_bytes();
  const auto all = static_cast<std::size_t>(at::CachingAllocator::StatType::AGGREGATE);
  return at::accelerator::getDeviceStats(device.index()).allocated_bytes[all].peak;
}

}  // namespace sluice
