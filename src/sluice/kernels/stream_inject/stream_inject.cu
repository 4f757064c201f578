// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once, in vectors of 16 bytes where width and addresses allow it,
// else one by one. Forward, a thread owns a vector of a token's features and goes through the streams. Backward, a
// block owns a token and goes twice over its gradients, the second time from its first-level cache. With g the gradient
// that arrives and a = sigmoid(gate):
//   dy = sum over s of 2 a_s g_s      dgate_s = 2 a_s (1 - a_s) (g_s . y)
#include "sluice/kernels/common/vector_launch.cuh"
#include "sluice/kernels/stream_inject/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <typename T, int kLanes>
__device__ Lanes<T, kLanes> load(const void* data, int64_t place) {
  return Lanes<T, kLanes>::load(static_cast<const T*>(data) + place);
}

template <typename T>
__device__ Sigmoid open_gate(const StreamInjectParams& params, int64_t token, int stream) {
  return sigmoid<T>(widen(static_cast<const T*>(params.gate)[token * params.streams + stream]));
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void inject(const __grid_constant__ StreamInjectParams params) {
  const int vectors = params.width / kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, token = index / vectors;
  if (token >= params.tokens) return;
  const int column = static_cast<int>(index % vectors) * kLanes;
  const auto y = load<T, kLanes>(params.y, index * kLanes);
#pragma unroll 4
  for (int s = 0; s < params.streams; ++s) {
    const int64_t here = (token * params.streams + s) * params.width + column;
    const auto residual = load<T, kLanes>(params.residual, here);
    const float share = 2.f * open_gate<T>(params, token, s).value;
    float out[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) out[i] = widen(residual.value[i]) + share * widen(y.value[i]);
    narrow<T>(out).store(static_cast<T*>(params.out) + here);
  }
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void inject_backward(
    const __grid_constant__ StreamInjectBackwardParams backward) {
  __shared__ float dots[kMaxInjectStreams][kWarps];  // g . y, a part a warp
  const StreamInjectParams& params = backward.forward;
  const int64_t token = blockIdx.x, grad_row = token * params.streams * params.width, y_row = token * params.width;
  for (int column = threadIdx.x * kLanes; column < params.width; column += kThreads * kLanes) {
    float sum[kLanes] = {};
#pragma unroll 4
    for (int s = 0; s < params.streams; ++s) {
      const auto grad = load<T, kLanes>(backward.grad_out, grad_row + s * params.width + column);
      const float share = 2.f * open_gate<T>(params, token, s).value;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum[i] += share * widen(grad.value[i]);
    }
    narrow<T>(sum).store(static_cast<T*>(backward.grad_y) + y_row + column);
  }
  for (int s = 0; s < params.streams; ++s) {
    float dot = 0.f;
    for (int column = threadIdx.x * kLanes; column < params.width; column += kThreads * kLanes) {
      const auto grad = load<T, kLanes>(backward.grad_out, grad_row + s * params.width + column);
      const auto y = load<T, kLanes>(params.y, y_row + column);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) dot += widen(grad.value[i]) * widen(y.value[i]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) dot += __shfl_xor_sync(~0u, dot, mask);
    if (threadIdx.x % 32 == 0) dots[s][threadIdx.x / 32] = dot;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < params.streams; s += kThreads) {
    float dot = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) dot += dots[s][warp];
    const Sigmoid a = open_gate<T>(params, token, s);
    static_cast<T*>(backward.grad_gate)[token * params.streams + s] = T(2.f * a.value * a.complement * dot);
  }
}

}  // namespace

cudaError_t launch_stream_inject(const StreamInjectParams& params, cudaStream_t stream) {
  const int64_t elements = params.tokens * params.width;
  if (elements == 0) return cudaSuccess;
  return launch_in_vectors(
      params.bfloat16, params.width, {params.residual, params.y}, {}, [&]<typename T, int kLanes>() {
        inject<T, kLanes><<<blocks_for(elements, kThreads * kLanes), kThreads, 0, stream>>>(params);
      });
}

cudaError_t launch_stream_inject_backward(const StreamInjectBackwardParams& params, cudaStream_t stream) {
  const StreamInjectParams& forward = params.forward;
  if (forward.tokens * forward.width == 0) return cudaSuccess;
  return launch_in_vectors(
      forward.bfloat16, forward.width, {params.grad_out, forward.y}, {}, [&]<typename T, int kLanes>() {
        inject_backward<T, kLanes><<<static_cast<unsigned>(forward.tokens), kThreads, 0, stream>>>(params);
      });
}

}  // namespace sluice
