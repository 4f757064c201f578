// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once, in vectors of 16 bytes where sizes and addresses allow it,
// else one by one. With s = sigmoid(gate) and g the gradient that arrives:
//   dgate = g up (s + gate s (1 - s))      dup = g gate s
#include <initializer_list>

#include "sluice/kernels/common/lanes.cuh"
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

template <typename T>
bool in_vectors(const SwiGluParams& params, std::initializer_list<SwiGluRows> all) {
  bool fits = params.features % kVector<T> == 0;
  for (const SwiGluRows& rows : all) {
    fits = fits && rows.stride % kVector<T> == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
  }
  return fits;
}

unsigned blocks_of(const SwiGluParams& params, int lanes) {
  return static_cast<unsigned>((params.tokens * (params.features / lanes) + kThreads - 1) / kThreads);
}

template <typename T>
void run(const SwiGluParams& params, cudaStream_t stream) {
  constexpr int kWide = kVector<T>;
  if (in_vectors<T>(params, {params.gate, params.up})) {
    activate<T, kWide><<<blocks_of(params, kWide), kThreads, 0, stream>>>(params);
  } else {
    activate<T, 1><<<blocks_of(params, 1), kThreads, 0, stream>>>(params);
  }
}

template <typename T>
void run(const SwiGluBackwardParams& params, cudaStream_t stream) {
  constexpr int kWide = kVector<T>;
  const SwiGluParams& forward = params.forward;
  if (in_vectors<T>(forward, {forward.gate, forward.up, params.grad_out})) {
    activate_backward<T, kWide><<<blocks_of(forward, kWide), kThreads, 0, stream>>>(params);
  } else {
    activate_backward<T, 1><<<blocks_of(forward, 1), kThreads, 0, stream>>>(params);
  }
}

template <typename Params>
cudaError_t run_typed(const Params& params, const SwiGluParams& forward, cudaStream_t stream) {
  if (forward.tokens * forward.features == 0) return cudaSuccess;
  if (forward.bfloat16) {
    run<__nv_bfloat16>(params, stream);
  } else {
    run<float>(params, stream);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_swiglu(const SwiGluParams& params, cudaStream_t stream) { return run_typed(params, params, stream); }

cudaError_t launch_swiglu_backward(const SwiGluBackwardParams& params, cudaStream_t stream) {
  return run_typed(params, params.forward, stream);
}

}  // namespace sluice
