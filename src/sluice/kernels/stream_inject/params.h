// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. All dense, float32 or bfloat16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

constexpr int kMaxInjectStreams = 64;  // whose sums a block holds

struct StreamInjectParams {
  const void* residual;  // [tokens, streams, width], not used by backward
  const void* y;         // [tokens, width]
  const void* gate;      // [tokens, streams]
  int64_t tokens;
  int32_t streams, width;
  bool bfloat16;

  void* out;  // [tokens, streams, width], not used by backward
};

struct StreamInjectBackwardParams {
  StreamInjectParams forward;
  const void* grad_out;  // [tokens, streams, width]

  void* grad_y;     // [tokens, width]
  void* grad_gate;  // [tokens, streams]
};

cudaError_t launch_stream_inject(const StreamInjectParams& params, cudaStream_t stream);
cudaError_t launch_stream_inject_backward(const StreamInjectBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
