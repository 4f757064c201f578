// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once, in vectors of 16 bytes where sizes and addresses allow it,
// else one by one. With s = sigmoid(gate) and g the gradient that arrives:
//   dgate = g up (s + gate s (1 - s))      dup = g gate s
#include "sluice/kernels/common/vector_launch.cuh"
#include "sluice/kernels/swiglu/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 256;

// The vector of a thread: where it lies in rows, and in dense results.
struct Place {
  int64_t row, dense;
  int column;
  bool exists;
};
template <int kLanes>
__device__ Place place_of_thread(const SwiGluParams& params) {
  const int vectors = params.features / kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, row = index / vectors;
  return {row, index * kLanes, static_cast<int>(index % vectors) * kLanes, row < params.tokens};
}

template <typename T, int kLanes>
__device__ Lanes<T, kLanes> load(const SwiGluRows& rows, const Place& place) {
  return Lanes<T, kLanes>::load(static_cast<const T*>(rows.data) + place.row * rows.stride + place.column);
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void activate(const __grid_constant__ SwiGluParams params) {
  const Place place = place_of_thread<kLanes>(params);
  if (!place.exists) return;
  const auto gate = load<T, kLanes>(params.gate, place), up = load<T, kLanes>(params.up, place);
  float out[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const float x = widen(gate.value[i]);
    out[i] = x * sigmoid<T>(x).value * widen(up.value[i]);
  }
  narrow<T>(out).store(static_cast<T*>(params.out) + place.dense);
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kThreads) void activate_backward(const __grid_constant__ SwiGluBackwardParams params) {
  const Place place = place_of_thread<kLanes>(params.forward);
  if (!place.exists) return;
  const auto gate = load<T, kLanes>(params.forward.gate, place), up = load<T, kLanes>(params.forward.up, place);
  const auto grad = load<T, kLanes>(params.grad_out, place);
  float grad_gate[kLanes], grad_up[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const float x = widen(gate.value[i]), g = widen(grad.value[i]);
    const Sigmoid s = sigmoid<T>(x);
    grad_gate[i] = g * widen(up.value[i]) * (s.value + x * s.value * s.complement);
    grad_up[i] = g * (x * s.value);
  }
  narrow<T>(grad_gate).store(static_cast<T*>(params.grad_gate) + place.dense);
  narrow<T>(grad_up).store(static_cast<T*>(params.grad_up) + place.dense);
}

}  // namespace

cudaError_t launch_swiglu(const SwiGluParams& params, cudaStream_t stream) {
  const int64_t elements = params.tokens * params.features;
  if (elements == 0) return cudaSuccess;
  const SwiGluRows &gate = params.gate, &up = params.up;
  return launch_in_vectors(
      params.bfloat16, params.features, {gate.data, up.data}, {gate.stride, up.stride}, [&]<typename T, int kLanes>() {
        activate<T, kLanes><<<blocks_for(elements, kThreads * kLanes), kThreads, 0, stream>>>(params);
      });
}

cudaError_t launch_swiglu_backward(const SwiGluBackwardParams& params, cudaStream_t stream) {
  const SwiGluParams& forward = params.forward;
  const int64_t elements = forward.tokens * forward.features;
  if (elements == 0) return cudaSuccess;
  const SwiGluRows &gate = forward.gate, &up = forward.up, &grad = params.grad_out;
  return launch_in_vectors(forward.bfloat16, forward.features, {gate.data, up.data, grad.data},
                           {gate.stride, up.stride, grad.stride}, [&]<typename T, int kLanes>() {
                             activate_backward<T, kLanes>
                                 <<<blocks_for(elements, kThreads * kLanes), kThreads, 0, stream>>>(params);
                           });
}

}  // namespace sluice
