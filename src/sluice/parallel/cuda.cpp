// SPDX-License-Identifier: Apache-2.0
// Exchanges between GPUs, through NCCL. In the CUDA library, which the program loads where it uses a GPU.
#define USE_C10D_NCCL  // as libtorch was built; its header is empty without
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>

// Found by name (parallel/communicator.cpp). The caller owns what comes back.
extern "C" c10d::Backend* sluice_new_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::milliseconds timeout, at::Device device) {
  // c10d's watchdog would wait a minute before it ends the process, for records of exchanges that nobody keeps.
  for (const auto* wait : {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}) ::setenv(wait, "0", 0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->is_high_priority_stream = true;  // its kernels are short, and products fill all multiprocessors
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  backend->setBoundDeviceId(device);
  return backend.release();
}
