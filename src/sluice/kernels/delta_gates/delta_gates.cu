// SPDX-License-Identifier: Apache-2.0
// One pass in each direction; a block takes 32 heads of a strip of tokens, and leaves its share of the sums over
// tokens. With x = a + dt_bias:
//   da = -dg exp(A_log) sigmoid(x)    db = dbeta beta (1 - beta)    dA_log = sum of dg g    ddt_bias = sum of da
#include <algorithm>

#include "sluice/kernels/common/column_sums.cuh"
#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/delta_gates/params.h"

namespace sluice {
namespace {

constexpr int kHeads = 32;
constexpr int kRows = 8;         // tokens that a block works on at once
constexpr int kSmallStrip = 64;  // tokens, at least
constexpr int kMaxStrips = 512;

int strip_of(int tokens) { return std::max(kSmallStrip, (tokens + kMaxStrips - 1) / kMaxStrips); }

__device__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

template <typename T>
__global__ void gates(const __grid_constant__ DeltaGatesParams params, int strip) {
  const int head = blockIdx.x * kHeads + threadIdx.x;
  if (head >= params.heads) return;
  const int first = blockIdx.y * strip, last = min(first + strip, params.tokens);
  const float rate = -expf(params.A_log[head]), bias = params.dt_bias[head];
#pragma unroll 4
  for (int token = first + threadIdx.y; token < last; token += kRows) {
    const float a = widen(static_cast<const T*>(params.a)[token * params.a_stride + head]);
    const float b = widen(static_cast<const T*>(params.b)[token * params.b_stride + head]);
    const int64_t index = static_cast<int64_t>(token) * params.heads + head;
    params.g[index] = rate * softplus(a + bias);
    params.beta[index] = sigmoid<float>(b).value;
  }
}

template <typename T>
__global__ void gates_backward(const __grid_constant__ DeltaGatesBackwardParams backward, int strip) {
  __shared__ float shares[2][kRows][kHeads];
  const DeltaGatesParams& params = backward.forward;
  const int head = blockIdx.x * kHeads + threadIdx.x;
  const bool exists = head < params.heads;
  const int first = blockIdx.y * strip, last = exists ? min(first + strip, params.tokens) : 0;
  const float rate = exists ? -expf(params.A_log[head]) : 0.f, bias = exists ? params.dt_bias[head] : 0.f;
  float rate_grad = 0.f, bias_grad = 0.f;
#pragma unroll 4
  for (int token = first + threadIdx.y; token < last; token += kRows) {
    const float x = widen(static_cast<const T*>(params.a)[token * params.a_stride + head]) + bias;
    const Sigmoid beta = sigmoid<float>(widen(static_cast<const T*>(params.b)[token * params.b_stride + head]));
    const int64_t index = static_cast<int64_t>(token) * params.heads + head;
    const float grad_g = backward.grad_g[index];
    const float grad_a = grad_g * rate * sigmoid<float>(x).value;
    rate_grad += grad_g * (rate * softplus(x));
    bias_grad += grad_a;
    static_cast<T*>(backward.grad_a)[token * backward.grad_a_stride + head] = T(grad_a);
    static_cast<T*>(backward.grad_b)[token * backward.grad_b_stride + head] =
        T(backward.grad_beta[index] * beta.value * beta.complement);
  }
  shares[0][threadIdx.y][threadIdx.x] = rate_grad;
  shares[1][threadIdx.y][threadIdx.x] = bias_grad;
  __syncthreads();
  if (threadIdx.y >= 2 || !exists) return;
  float sum = 0.f;
  for (int row = 0; row < kRows; ++row) sum += shares[threadIdx.y][row][threadIdx.x];
  backward.partial[(static_cast<int64_t>(blockIdx.y) * 2 + threadIdx.y) * params.heads + head] = sum;
}

__global__ void add_shares(const __grid_constant__ DeltaGatesBackwardParams backward, int strips) {
  const int heads = backward.forward.heads;
  const float sum = column_sum(backward.partial, strips, 2 * heads);
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  if (threadIdx.y > 0 || column >= 2 * heads) return;
  if (column < heads) {
    backward.grad_A_log[column] = sum;
  } else {
    backward.grad_dt_bias[column - heads] = sum;
  }
}

dim3 grid_of(const DeltaGatesParams& params) {
  return dim3((params.heads + kHeads - 1) / kHeads, delta_gates_strips(params.tokens));
}

}  // namespace

int32_t delta_gates_strips(int32_t tokens) { return (tokens + strip_of(tokens) - 1) / strip_of(tokens); }

cudaError_t launch_delta_gates(const DeltaGatesParams& params, cudaStream_t stream) {
  if (params.tokens == 0 || params.heads == 0) return cudaSuccess;
  const auto kernel = params.bfloat16 ? gates<__nv_bfloat16> : gates<float>;
  kernel<<<grid_of(params), dim3(kHeads, kRows), 0, stream>>>(params, strip_of(params.tokens));
  return cudaGetLastError();
}

cudaError_t launch_delta_gates_backward(const DeltaGatesBackwardParams& params, cudaStream_t stream) {
  const DeltaGatesParams& forward = params.forward;
  if (forward.heads == 0) return cudaSuccess;
  if (forward.tokens > 0) {
    const auto kernel = forward.bfloat16 ? gates_backward<__nv_bfloat16> : gates_backward<float>;
    kernel<<<grid_of(forward), dim3(kHeads, kRows), 0, stream>>>(params, strip_of(forward.tokens));
  }
  add_shares<<<column_sum_blocks(2 * forward.heads), column_sum_threads(), 0, stream>>>(
      params, delta_gates_strips(forward.tokens));
  return cudaGetLastError();
}

}  // namespace sluice
