// SPDX-License-Identifier: Apache-2.0
// Launches of kernels that take more shared memory than the 48 KiB that need no word.
#pragma once

#include <cuda_runtime_api.h>

namespace sluice {

// kernel<<<blocks, threads, bytes, stream>>>(arguments...)
template <typename... Parameters, typename... Arguments>
cudaError_t launch_with_shared_memory(void (*kernel)(Parameters...), int blocks, int threads, int bytes,
                                      cudaStream_t stream, const Arguments&... arguments) {
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<blocks, threads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace sluice
