// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. V logits a row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sluice/kernels/draw_tokens/settings.h"

namespace sluice {

struct DrawTokensParams {
  const void* logits;            // [rows, V]; within a row elements are neighbours
  int64_t row_stride;            // in elements
  const DrawSettings* settings;  // [rows]
  const bool* seen;              // [rows, drawable], or null
  int32_t rows, vocabulary, drawable;
  bool bfloat16;  // otherwise float32

  DrawnToken* drawn;  // [rows]
};

constexpr int32_t kDrawTokensMostIds = 1 << 30;
constexpr int32_t kDrawTokensMostRows = 1 << 27;
cudaError_t launch_draw_tokens(const DrawTokensParams& params, cudaStream_t stream);

}  // namespace sluice
