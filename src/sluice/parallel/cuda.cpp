// SPDX-License-Identifier: Apache-2.0
// Exchanges between GPUs, through NCCL. In the CUDA library, which the program loads where it uses a GPU.
#define USE_C10D_NCCL  // as libtorch was built; its header is empty without
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdio>
#include <cstdlib>
#include <exception>

namespace {

// NCCL's exchanges run on behind the program's back: c10d's watchdog finds one that failed or took too long, and throws
// where nobody can catch. The process ends with one line then.
[[noreturn]] void end_with_one_line() {
  std::string reason = "unknown";
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      reason = known.what();
    } catch (...) {
    }
  }
  std::fprintf(stderr, "sluice: parallel: an exchange between GPUs failed, or a rank was missing in it: %s\n",
               reason.substr(0, reason.find('\n')).c_str());
  std::_Exit(1);
}

}  // namespace

// Found by name (parallel/communicator.cpp). The caller owns what comes back.
extern "C" c10d::Backend* sluice_new_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::milliseconds timeout, at::Device device) {
  std::set_terminate(end_with_one_line);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  backend->setBoundDeviceId(device);
  return backend.release();
}
