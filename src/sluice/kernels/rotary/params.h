// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. T tokens, H heads, d head dim, rd rotary dims.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

struct RotaryParams {
  const void* x;                      // [T, H, d], float32 or bfloat16; within a head elements are neighbours
  int64_t token_stride, head_stride;  // elements
  const float* cos;                   // [T, rd/2]
  const float* sin;
  int64_t tokens;
  int32_t heads, head_dim, half;  // half = rd/2
  bool bfloat16;

  void* out;  // [T, H, d], dtype of x
};

cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream);

}  // namespace sluice
