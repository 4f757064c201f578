// SPDX-License-Identifier: Apache-2.0
// The convolution token by token, for decoding: a thread owns a channel of a sequence, whose last three inputs it keeps
// in registers.
#include "sluice/kernels/causal_conv/params.h"
#include "sluice/kernels/common/lanes.cuh"

namespace sluice {
namespace {

constexpr int kThreads = 128;
constexpr int kWidth = 4;

template <typename T, typename Weight>
__global__ void few_tokens(const CausalConvCachedParams params) {
  const auto& conv = params.conv;
  const int channel = blockIdx.x * kThreads + threadIdx.x, sequence = blockIdx.y;
  const int first = conv.cu_seqlens[sequence], last = conv.cu_seqlens[sequence + 1];
  if (channel >= conv.channels || first == last) return;
  T* const state = static_cast<T*>(params.states) + (params.slots[sequence] * conv.channels + channel) * (kWidth - 1);
  const auto weight = Lanes<Weight, kWidth>::load(static_cast<const Weight*>(conv.weight) + channel * kWidth);
  T seen[kWidth];  // oldest first; the last is the token's own
#pragma unroll
  for (int i = 0; i < kWidth - 1; ++i) seen[i + 1] = state[i];
  for (int token = first; token < last; ++token) {
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) seen[i] = seen[i + 1];
    seen[kWidth - 1] = static_cast<const T*>(conv.x)[token * conv.x_stride + channel];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum = fmaf(widen(weight.value[i]), widen(seen[i]), sum);
    if (conv.silu) sum *= sigmoid<T>(sum).value;
    static_cast<T*>(conv.out)[static_cast<int64_t>(token) * conv.channels + channel] = T(sum);
  }
#pragma unroll
  for (int i = 0; i < kWidth - 1; ++i) state[i] = seen[i + 1];
}

template <typename T>
void launch(const CausalConvCachedParams& params, cudaStream_t stream) {
  const dim3 blocks((params.conv.channels + kThreads - 1) / kThreads, params.conv.sequences);
  if (params.conv.weight_type == ConvType::kFp32) {
    few_tokens<T, float><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    few_tokens<T, __nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
  }
}

}  // namespace

cudaError_t launch_causal_conv_cached(const CausalConvCachedParams& params, cudaStream_t stream) {
  if (params.conv.sequences == 0) return cudaSuccess;
  if (params.conv.type == ConvType::kFp32) {
    launch<float>(params, stream);
  } else {
    launch<__nv_bfloat16>(params, stream);
  }
  return cudaGetLastError();
}

}  // namespace sluice
