// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once. A thread turns one vector of first partners with the vector
// of their second partners, or passes one vector on; vectors of 16 bytes where sizes and addresses allow it, else of
// one element.
#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/rotary/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 256;

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void rotate(const __grid_constant__ RotaryParams params) {
  const int vectors = params.head_dim / kLanes, half = params.half / kLanes;
  const int work = vectors - half;  // of a head: its pairs, then the rest
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / work, token = row / params.heads;
  if (token >= params.tokens) return;
  const int own = static_cast<int>(index % work);
  const T* x = static_cast<const T*>(params.x) + token * params.token_stride + row % params.heads * params.head_stride;
  T* out = static_cast<T*>(params.out) + row * params.head_dim;
  if (own >= half) {
    const int column = (own + half) * kLanes;
    Lanes<T, kLanes>::load(x + column).store(out + column);
    return;
  }
  const int first = own * kLanes, second = first + params.half;
  const auto a = Lanes<T, kLanes>::load(x + first), b = Lanes<T, kLanes>::load(x + second);
  const float *cos = params.cos + token * params.half + first, *sin = params.sin + token * params.half + first;
  float turned_a[kLanes], turned_b[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    turned_a[i] = widen(a.value[i]) * cos[i] - widen(b.value[i]) * sin[i];
    turned_b[i] = widen(b.value[i]) * cos[i] + widen(a.value[i]) * sin[i];
  }
  narrow<T>(turned_a).store(out + first);
  narrow<T>(turned_b).store(out + second);
}

template <typename T>
void run(const RotaryParams& params, cudaStream_t stream) {
  constexpr int kWide = kVector<T>;
  const bool wide = params.head_dim % kWide == 0 && params.half % kWide == 0 && params.token_stride % kWide == 0 &&
                    params.head_stride % kWide == 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0;
  const int64_t work = (params.head_dim - params.half) / (wide ? kWide : 1);
  const int64_t threads = params.tokens * params.heads * work;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  if (wide) rotate<T, kWide><<<blocks, kThreads, 0, stream>>>(params);
  else rotate<T, 1><<<blocks, kThreads, 0, stream>>>(params);
}

}  // namespace

cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  if (params.tokens * params.heads * params.head_dim == 0) return cudaSuccess;
  if (params.bfloat16) run<__nv_bfloat16>(params, stream);
  else run<float>(params, stream);
  return cudaGetLastError();
}

}  // namespace sluice
