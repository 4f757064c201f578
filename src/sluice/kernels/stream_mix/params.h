// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. All dense, float32 or bfloat16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

struct StreamMixParams {
  const void *x, *gate;  // [tokens, streams, width]
  int64_t tokens;
  int32_t streams, width;
  bool bfloat16;

  void* out;  // [tokens, width], not used by backward
};

struct StreamMixBackwardParams {
  StreamMixParams forward;
  const void* grad_out;  // [tokens, width]

  void *grad_x, *grad_gate;  // [tokens, streams, width]
};

cudaError_t launch_stream_mix(const StreamMixParams& params, cudaStream_t stream);
cudaError_t launch_stream_mix_backward(const StreamMixBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
