// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. T tokens, H heads, V value dim; a row is a token's head.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

enum class NormType : int { kFp32, kBf16 };

// Rows [T, H, V]; within a row elements are neighbours.
struct NormRows {
  const void* data;
  int64_t token_stride, head_stride;
};
struct MutableNormRows {
  void* data;
  int64_t token_stride, head_stride;
};

struct GatedRmsNormParams {
  NormRows x, gate;
  const void* weight;  // [V]
  int64_t tokens;      // T H < 2^31
  int32_t heads, value_dim;
  NormType type, weight_type;
  float eps;
  bool silu;  // else sigmoid

  MutableNormRows out;
};

struct GatedRmsNormBackwardParams {
  GatedRmsNormParams forward;  // its out is not used
  NormRows grad_out;
  float* partial;  // [gated_rms_norm_blocks(T H), V], scratch

  MutableNormRows grad_x;     // may be x itself
  MutableNormRows grad_gate;  // may be gate itself
  void* grad_weight;          // [V] in the weight's type
};

// Into how many pieces the sum over rows of the weight's gradient is cut.
int32_t gated_rms_norm_blocks(int64_t rows);

cudaError_t launch_gated_rms_norm(const GatedRmsNormParams& params, cudaStream_t stream);
cudaError_t launch_gated_rms_norm_backward(const GatedRmsNormBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
