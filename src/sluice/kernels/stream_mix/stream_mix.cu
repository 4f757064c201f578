// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once, in vectors of 16 bytes where width and addresses allow it,
// else one by one. A thread owns a vector of a token's features and goes through the streams. With g the gradient that
// arrives, over n, and a = sigmoid(gate):
//   dx = g a      dgate = g x a (1 - a)
#include "sluice/kernels/common/vector_launch.cuh"
#include "sluice/kernels/stream_mix/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 256;

// The thread's vector: in [tokens, width], and of the first stream in [tokens, streams, width].
struct Place {
  int64_t dense, stream;
  bool exists;
};
template <int kLanes>
__device__ Place place_of_thread(const StreamMixParams& params) {
  const int vectors = params.width / kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, token = index / vectors;
  const int column = static_cast<int>(index % vectors) * kLanes;
  return {index * kLanes, token * params.streams * params.width + column, token < params.tokens};
}

template <typename T, int kLanes>
__device__ Lanes<T, kLanes> load(const void* data, int64_t place) {
  return Lanes<T, kLanes>::load(static_cast<const T*>(data) + place);
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void mix(const __grid_constant__ StreamMixParams params) {
  const Place place = place_of_thread<kLanes>(params);
  if (!place.exists) return;
  float sum[kLanes] = {};
#pragma unroll 4
  for (int s = 0; s < params.streams; ++s) {
    const int64_t here = place.stream + static_cast<int64_t>(s) * params.width;
    const auto x = load<T, kLanes>(params.x, here), gate = load<T, kLanes>(params.gate, here);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum[i] += sigmoid<T>(widen(gate.value[i])).value * widen(x.value[i]);
  }
#pragma unroll
  for (float& x : sum) x /= static_cast<float>(params.streams);
  narrow<T>(sum).store(static_cast<T*>(params.out) + place.dense);
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void mix_backward(const __grid_constant__ StreamMixBackwardParams backward) {
  const StreamMixParams& params = backward.forward;
  const Place place = place_of_thread<kLanes>(params);
  if (!place.exists) return;
  const auto grad_out = load<T, kLanes>(backward.grad_out, place.dense);
  float grad[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) grad[i] = widen(grad_out.value[i]) / static_cast<float>(params.streams);
#pragma unroll 4
  for (int s = 0; s < params.streams; ++s) {
    const int64_t here = place.stream + static_cast<int64_t>(s) * params.width;
    const auto x = load<T, kLanes>(params.x, here), gate = load<T, kLanes>(params.gate, here);
    float grad_x[kLanes], grad_gate[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const Sigmoid a = sigmoid<T>(widen(gate.value[i]));
      grad_x[i] = grad[i] * a.value;
      grad_gate[i] = grad_x[i] * widen(x.value[i]) * a.complement;
    }
    narrow<T>(grad_x).store(static_cast<T*>(backward.grad_x) + here);
    narrow<T>(grad_gate).store(static_cast<T*>(backward.grad_gate) + here);
  }
}

}  // namespace

cudaError_t launch_stream_mix(const StreamMixParams& params, cudaStream_t stream) {
  const int64_t elements = params.tokens * params.width;
  if (elements == 0) return cudaSuccess;
  return launch_in_vectors(params.bfloat16, params.width, {params.x, params.gate}, {}, [&]<typename T, int kLanes>() {
    mix<T, kLanes><<<blocks_for(elements, kThreads * kLanes), kThreads, 0, stream>>>(params);
  });
}

cudaError_t launch_stream_mix_backward(const StreamMixBackwardParams& params, cudaStream_t stream) {
  const StreamMixParams& forward = params.forward;
  const int64_t elements = forward.tokens * forward.width;
  if (elements == 0) return cudaSuccess;
  return launch_in_vectors(
      forward.bfloat16, forward.width, {forward.x, forward.gate, params.grad_out}, {}, [&]<typename T, int kLanes>() {
        mix_backward<T, kLanes><<<blocks_for(elements, kThreads * kLanes), kThreads, 0, stream>>>(params);
      });
}

}  // namespace sluice
