// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. T tokens, F features.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

// Rows [T, F], float32 or bfloat16; within a row elements are neighbours.
struct SwiGluRows {
  const void* data;
  int64_t stride;  // elements from row to row
};

struct SwiGluParams {
  SwiGluRows gate, up;
  int64_t tokens;
  int32_t features;
  bool bfloat16;

  void* out;  // [T, F] dense, not used by backward
};

struct SwiGluBackwardParams {
  SwiGluParams forward;
  SwiGluRows grad_out;

  void *grad_gate, *grad_up;  // [T, F] dense
};

cudaError_t launch_swiglu(const SwiGluParams& params, cudaStream_t stream);
cudaError_t launch_swiglu_backward(const SwiGluBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
