// SPDX-License-Identifier: Apache-2.0
// The border between tensors and device code. T packed tokens, C channels, N sequences; the width is 4.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice {

enum class ConvType : int { kFp32, kBf16 };

struct CausalConvParams {
  const void* x;              // [T, C]
  const void* weight;         // [C, 4], aligned to its 4 elements
  const int32_t* cu_seqlens;  // [N + 1]
  const void* initial_state;  // [N, C, 3] in the type of x, or null for zeros
  int32_t tokens, channels, sequences;
  int64_t x_stride;  // elements between tokens
  ConvType type, weight_type;
  bool silu;

  void* out;          // [T, C], dense
  void* final_state;  // [N, C, 3]
};

// A few tokens of each sequence, whose states are read and written in place.
struct CausalConvCachedParams {
  CausalConvParams conv;  // without initial_state and final_state
  const int64_t* slots;   // [N]
  void* states;           // [.., C, 3] in the type of x
};

struct CausalConvBackwardParams {
  CausalConvParams forward;      // its out and final_state are not used
  const void* grad_out;          // [T, C]
  const void* grad_final_state;  // [N, C, 3], or null for zeros
  int64_t grad_out_stride, grad_x_stride;
  float* partial;  // [causal_conv_strips(T), 4, C], scratch
  void* halo;      // [causal_conv_strips(T), 6, C] in the type of x, scratch; null unless grad_x is x

  void* grad_x;              // [T, C], may be x itself
  void* grad_weight;         // [C, 4] in the weight's type
  void* grad_initial_state;  // [N, C, 3], or null when not wanted
};

// Into how many pieces the sum over tokens of the weight's gradient is cut.
int32_t causal_conv_strips(int32_t tokens);

cudaError_t launch_causal_conv(const CausalConvParams& params, cudaStream_t stream);
cudaError_t launch_causal_conv_cached(const CausalConvCachedParams& params, cudaStream_t stream);
cudaError_t launch_causal_conv_backward(const CausalConvBackwardParams& params, cudaStream_t stream);

}  // namespace sluice
