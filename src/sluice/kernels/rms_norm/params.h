// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. Rows of `width` elements, `heads` of them a token.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

// Rows [tokens, heads, width]; within a row elements are neighbours. float32 or bfloat16.
struct RmsNormRows {
  const void* data;
  int64_t token_stride, head_stride;
};

struct RmsNormParams {
  RmsNormRows x;
  const void* weight;  // [weight_heads, width], which the rows take in turn
  int64_t rows;        // tokens * heads, a multiple of weight_heads
  int32_t heads, width, weight_heads;
  bool bfloat16, bfloat16_weight;  // of x, gradients and results; of weight and its gradient. Otherwise float32
  float eps;
  bool zero_centered;

  void* out;  // [rows, width]
};

struct RmsNormBackwardParams {
  RmsNormParams forward;  // its out is not used
  RmsNormRows grad_out;
  float* partial;  // [rms_norm_blocks(forward), weight_heads, width], scratch

  void* grad_x;       // [rows, width]
  void* grad_weight;  // [weight_heads, width]
};

// Into how many pieces the sums over rows of the weight's gradient are cut.
int32_t rms_norm_blocks(const RmsNormParams& params);

cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);
cudaError_t launch_rms_norm_backward(const RmsNormBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
