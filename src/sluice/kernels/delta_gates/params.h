// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. T tokens, H heads; heads are neighbours, tokens may lie further apart.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

struct DeltaGatesParams {
  const void* a;         // [T, H]
  const void* b;         // [T, H]
  const float* A_log;    // [H]
  const float* dt_bias;  // [H]
  int32_t tokens, heads;
  int64_t a_stride, b_stride;  // elements between tokens
  bool bfloat16;               // a and b; else float32

  float* g;     // [T, H], dense
  float* beta;  // [T, H], dense
};

struct DeltaGatesBackwardParams {
  DeltaGatesParams forward;  // its g and beta are not used
  const float* grad_g;       // [T, H], dense
  const float* grad_beta;    // [T, H], dense
  float* partial;            // [delta_gates_strips(T), 2, H], scratch

  void* grad_a;  // [T, H], may be a itself
  void* grad_b;  // [T, H], may be b itself
  int64_t grad_a_stride, grad_b_stride;
  float* grad_A_log;    // [H]
  float* grad_dt_bias;  // [H]
};

// Into how many pieces the sums over tokens are cut.
int32_t delta_gates_strips(int32_t tokens);

cudaError_t launch_delta_gates(const DeltaGatesParams& params, cudaStream_t stream);
cudaError_t launch_delta_gates_backward(const DeltaGatesBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
