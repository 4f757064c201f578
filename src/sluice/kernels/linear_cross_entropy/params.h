// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code: the passes over a tile of logits, n tokens by V ids.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

// Softmax of each row: what forward returns.
struct LogitsParams {
  const float* logits;     // [n, V]
  const int64_t* targets;  // [n]; -100: ignored, -1: elsewhere, its logit 0
  int32_t tokens;          // n
  int64_t vocabulary;      // V
  float scale;             // multiplies the logits

  float* nll;          // [n]; 0 where ignored, NaN where the target is no id
  int64_t* predicted;  // [n]; -100 where ignored
  float* lse;          // [n]; 0 where ignored
  float* entropy;      // [n]; 0 where ignored; null: nobody asks
};

// Logits to their gradients, scale (grad_nll (p - onehot) - grad_entropy p (log p + entropy)) with p their softmax; 0
// where ignored.
struct LogitGradientsParams {
  const float* logits;                  // [n, V]
  const int64_t* targets;               // [n]
  const float* lse;                     // [n]
  const float* grad_nll;                // [n]
  const float *entropy, *grad_entropy;  // [n], or both null: no gradient of the entropy
  int32_t tokens;
  int64_t vocabulary;
  float scale;    // multiplies the logits
  bool bfloat16;  // type of the gradients, otherwise float32

  void* gradients;  // [n, V]; float32 may be the logits themselves
};

cudaError_t launch_logits(const LogitsParams& params, cudaStream_t stream);
cudaError_t launch_logit_gradients(const LogitGradientsParams& params, cudaStream_t stream);

}  // namespace sluice
