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
  const void* weight;  // [width]
  int64_t rows;        // tokens * heads
  int32_t heads, width;
  bool bfloat16, bfloat16_weight;  // of x, gradients and results; of weight and its gradient. Otherwise float32
  float eps;
  bool zero_centered;

  void* out;  // [rows, width]
};

struct RmsNormBackwardParams {
  RmsNormParams forward;  // its out is not used
  RmsNormRows grad_out;
  float* partial;  // [rms_norm_blocks(rows), width], scratch

  void* grad_x;       // [rows, width]
  void* grad_weight;  // [width]
};

// Into how many pieces the sum over rows of the weight's gradient is cut.
int32_t rms_norm_blocks(int64_t rows);

cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);
cudaError_t launch_rms_norm_backward(const RmsNormBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
