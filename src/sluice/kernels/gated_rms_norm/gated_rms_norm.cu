// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once. Where a row is 8, 16 or 32 vectors of 16 bytes, as many
// threads own it, one vector each, and sums over the row go through shuffles; any other row belongs to a warp, element
// by element. With r = 1 / sqrt(mean(x^2) + eps), u = x r and h = g a(z) w, the gradient that reaches u:
//   dx = r (h - u mean(h u))      dz = g w u a'(z)      dw = sum over rows of g a(z) u
#include <algorithm>

#include "sluice/kernels/common/column_sums.cuh"
#include "sluice/kernels/common/vector_launch.cuh"
#include "sluice/kernels/gated_rms_norm/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 256;
constexpr int kResident = 3;      // blocks a multiprocessor in the backward pass
constexpr int kMaxBlocks = 1188;  // of the weight's gradient: three rounds of these on each of 132 multiprocessors

template <typename T>
__device__ const T* row_of(const NormRows& rows, uint32_t row, uint32_t heads) {
  return static_cast<const T*>(rows.data) + row / heads * rows.token_stride + row % heads * rows.head_stride;
}
template <typename T>
__device__ T* row_of(const MutableNormRows& rows, uint32_t row, uint32_t heads) {
  return static_cast<T*>(rows.data) + row / heads * rows.token_stride + row % heads * rows.head_stride;
}
__device__ uint32_t row_count(const GatedRmsNormParams& params) {
  return static_cast<uint32_t>(params.tokens) * params.heads;
}

template <int kGroup>
__device__ float group_sum(float x) {
#pragma unroll
  for (int mask = kGroup / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

struct Opening {
  float value, slope;  // a(z), a'(z)
};
template <typename T>
__device__ Opening open_gate(float z, bool silu) {
  const Sigmoid s = sigmoid<T>(z);
  const float slope = s.value * s.complement;
  return silu ? Opening{z * s.value, s.value + z * slope} : Opening{s.value, slope};
}

// 1 / sqrt(mean(x^2) + eps); 0 where the squares overflow.
__device__ float inverse_rms(float squares, const GatedRmsNormParams& params) {
  return 1.f / sqrtf(squares / static_cast<float>(params.value_dim) + params.eps);
}

template <typename T, typename Weight, int kGroup>
__global__ __launch_bounds__(kThreads) void normalize(const __grid_constant__ GatedRmsNormParams params) {
  constexpr int kLanes = kVector<T>;
  const uint32_t row = blockIdx.x * (kThreads / kGroup) + threadIdx.x / kGroup, rows = row_count(params);
  const int column = threadIdx.x % kGroup * kLanes;
  const uint32_t source = min(row, rows - 1);  // every thread takes part in the shuffles
  const auto x = Lanes<T, kLanes>::load(row_of<T>(params.x, source, params.heads) + column);
  const auto gate = Lanes<T, kLanes>::load(row_of<T>(params.gate, source, params.heads) + column);
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) squares += widen(x.value[i]) * widen(x.value[i]);
  const float r = inverse_rms(group_sum<kGroup>(squares), params);
  float y[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const float weight = widen(static_cast<const Weight*>(params.weight)[column + i]);
    y[i] = weight * (widen(x.value[i]) * r) * open_gate<T>(widen(gate.value[i]), params.silu).value;
  }
  if (row < rows) narrow<T>(y).store(row_of<T>(params.out, row, params.heads) + column);
}

template <typename T, typename Weight>
__global__ __launch_bounds__(kThreads) void normalize_any(const __grid_constant__ GatedRmsNormParams params) {
  const uint32_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (row >= row_count(params)) return;
  const int lane = threadIdx.x % 32;
  const T* x = row_of<T>(params.x, row, params.heads);
  const T* gate = row_of<T>(params.gate, row, params.heads);
  T* out = row_of<T>(params.out, row, params.heads);
  float squares = 0.f;
  for (int i = lane; i < params.value_dim; i += 32) squares += widen(x[i]) * widen(x[i]);
  const float r = inverse_rms(group_sum<32>(squares), params);
  for (int i = lane; i < params.value_dim; i += 32) {
    const float weight = widen(static_cast<const Weight*>(params.weight)[i]);
    out[i] = T(weight * (widen(x[i]) * r) * open_gate<T>(widen(gate[i]), params.silu).value);
  }
}

// Groups take the rows in turn, the next of which is on its way while one is worked on; a block adds up its share of
// the weight's gradient.
template <typename T, typename Weight, int kGroup>
__global__ __launch_bounds__(kThreads, kResident) void normalize_backward(
    const __grid_constant__ GatedRmsNormBackwardParams backward) {
  constexpr int kLanes = kVector<T>;
  constexpr int kGroups = kThreads / kGroup;
  using Row = Lanes<T, kLanes>;
  __shared__ float shares[kGroups][kGroup * kLanes];
  const GatedRmsNormParams& params = backward.forward;
  const uint32_t rows = row_count(params), stride = gridDim.x * kGroups;
  const int group = threadIdx.x / kGroup, column = threadIdx.x % kGroup * kLanes;
  float weight[kLanes], weight_grad[kLanes] = {};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) weight[i] = widen(static_cast<const Weight*>(params.weight)[column + i]);
  Row next_x, next_gate, next_grad;
  const auto load = [&](uint32_t row) {  // the last one where there is none: every thread takes part in the shuffles
    row = min(row, rows - 1);
    next_x = Row::load(row_of<T>(params.x, row, params.heads) + column);
    next_gate = Row::load(row_of<T>(params.gate, row, params.heads) + column);
    next_grad = Row::load(row_of<T>(backward.grad_out, row, params.heads) + column);
  };
  load(blockIdx.x * kGroups + group);
  for (uint32_t first = blockIdx.x * kGroups; first < rows; first += stride) {
    const uint32_t row = first + group;
    const Row x = next_x, gate = next_gate, grad = next_grad;
    if (first + stride < rows) load(row + stride);
    float squares = 0.f, dot = 0.f;  // sum of h x
    float reaching[kLanes];          // h
    float slope[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const float value = widen(x.value[i]);
      const Opening opening = open_gate<T>(widen(gate.value[i]), params.silu);
      squares += value * value;
      reaching[i] = widen(grad.value[i]) * opening.value;
      slope[i] = widen(grad.value[i]) * opening.slope;
      dot += reaching[i] * weight[i] * value;
    }
    const float r = inverse_rms(group_sum<kGroup>(squares), params);
    const float along = group_sum<kGroup>(dot) * r / static_cast<float>(params.value_dim);
    if (row >= rows) continue;
    float grad_x[kLanes], grad_gate[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const float unit = widen(x.value[i]) * r;
      weight_grad[i] += reaching[i] * unit;
      grad_x[i] = r * (reaching[i] * weight[i] - unit * along);
      grad_gate[i] = slope[i] * weight[i] * unit;
    }
    narrow<T>(grad_x).store(row_of<T>(backward.grad_x, row, params.heads) + column);
    narrow<T>(grad_gate).store(row_of<T>(backward.grad_gate, row, params.heads) + column);
  }
#pragma unroll
  for (int i = 0; i < kLanes; ++i) shares[group][column + i] = weight_grad[i];
  __syncthreads();
  for (int i = threadIdx.x; i < params.value_dim; i += kThreads) {
    float sum = 0.f;
    for (int g = 0; g < kGroups; ++g) sum += shares[g][i];
    backward.partial[static_cast<int64_t>(blockIdx.x) * params.value_dim + i] = sum;
  }
}

// A block is one warp.
template <typename T, typename Weight>
__global__ __launch_bounds__(32) void normalize_any_backward(
    const __grid_constant__ GatedRmsNormBackwardParams backward) {
  const GatedRmsNormParams& params = backward.forward;
  const uint32_t rows = row_count(params);
  float* share = backward.partial + static_cast<int64_t>(blockIdx.x) * params.value_dim;
  for (int i = threadIdx.x; i < params.value_dim; i += 32) share[i] = 0.f;
  for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* x = row_of<T>(params.x, row, params.heads);
    const T* gate = row_of<T>(params.gate, row, params.heads);
    const T* grad = row_of<T>(backward.grad_out, row, params.heads);
    T* grad_x = row_of<T>(backward.grad_x, row, params.heads);
    T* grad_gate = row_of<T>(backward.grad_gate, row, params.heads);
    float squares = 0.f, dot = 0.f;
    for (int i = threadIdx.x; i < params.value_dim; i += 32) {
      const float value = widen(x[i]), weight = widen(static_cast<const Weight*>(params.weight)[i]);
      squares += value * value;
      dot += widen(grad[i]) * open_gate<T>(widen(gate[i]), params.silu).value * weight * value;
    }
    const float r = inverse_rms(group_sum<32>(squares), params);
    const float along = group_sum<32>(dot) * r / static_cast<float>(params.value_dim);
    for (int i = threadIdx.x; i < params.value_dim; i += 32) {
      const Opening opening = open_gate<T>(widen(gate[i]), params.silu);
      const float unit = widen(x[i]) * r, weight = widen(static_cast<const Weight*>(params.weight)[i]);
      const float g = widen(grad[i]);
      share[i] += g * opening.value * unit;
      grad_x[i] = T(r * (g * opening.value * weight - unit * along));
      grad_gate[i] = T(g * weight * unit * opening.slope);
    }
  }
}

template <typename Weight>
__global__ void add_shares(const __grid_constant__ GatedRmsNormBackwardParams backward, int blocks) {
  const int columns = backward.forward.value_dim;
  const float sum = column_sum(backward.partial, blocks, columns);
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  if (threadIdx.y == 0 && column < columns) static_cast<Weight*>(backward.grad_weight)[column] = Weight(sum);
}

NormRows constant(const MutableNormRows& rows) { return {rows.data, rows.token_stride, rows.head_stride}; }

// Threads that own a row, a vector each; 0 where rows do not divide so.
template <typename T>
int group_size(const GatedRmsNormParams& params, std::initializer_list<NormRows> all) {
  for (const NormRows& rows : all) {
    if (!in_vectors<T>(params.value_dim, {rows.data}, {rows.token_stride, rows.head_stride})) return 0;
  }
  const int vectors = params.value_dim / kVector<T>;
  return vectors == 8 || vectors == 16 || vectors == 32 ? vectors : 0;
}

template <typename T, typename Weight>
void run(const GatedRmsNormParams& params, cudaStream_t stream) {
  const int64_t rows = params.tokens * params.heads;
  const auto launch = [&](auto kernel, int group) {
    kernel<<<blocks_for(rows, kThreads / group), kThreads, 0, stream>>>(params);
  };
  switch (group_size<T>(params, {params.x, params.gate, constant(params.out)})) {
    case 8:
      return launch(normalize<T, Weight, 8>, 8);
    case 16:
      return launch(normalize<T, Weight, 16>, 16);
    case 32:
      return launch(normalize<T, Weight, 32>, 32);
    default:
      return launch(normalize_any<T, Weight>, 32);
  }
}

template <typename T, typename Weight>
void run(const GatedRmsNormBackwardParams& params, cudaStream_t stream) {
  const GatedRmsNormParams& forward = params.forward;
  const int blocks = gated_rms_norm_blocks(forward.tokens * forward.heads);
  if (blocks > 0) {
    switch (group_size<T>(
        forward, {forward.x, forward.gate, params.grad_out, constant(params.grad_x), constant(params.grad_gate)})) {
      case 8:
        normalize_backward<T, Weight, 8><<<blocks, kThreads, 0, stream>>>(params);
        break;
      case 16:
        normalize_backward<T, Weight, 16><<<blocks, kThreads, 0, stream>>>(params);
        break;
      case 32:
        normalize_backward<T, Weight, 32><<<blocks, kThreads, 0, stream>>>(params);
        break;
      default:
        normalize_any_backward<T, Weight><<<blocks, 32, 0, stream>>>(params);
    }
  }
  add_shares<Weight><<<column_sum_blocks(forward.value_dim), column_sum_threads(), 0, stream>>>(params, blocks);
}

template <typename Params>
cudaError_t run_typed(const Params& params, NormType type, NormType weight_type, cudaStream_t stream) {
  if (type == NormType::kFp32) {
    run<float, float>(params, stream);
  } else if (weight_type == NormType::kFp32) {
    run<__nv_bfloat16, float>(params, stream);
  } else {
    run<__nv_bfloat16, __nv_bfloat16>(params, stream);
  }
  return cudaGetLastError();
}

}  // namespace

int32_t gated_rms_norm_blocks(int64_t rows) {
  constexpr int64_t kRows = 64;  // at least
  return static_cast<int32_t>(std::min<int64_t>(kMaxBlocks, (rows + kRows - 1) / kRows));
}

cudaError_t launch_gated_rms_norm(const GatedRmsNormParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  return run_typed(params, params.type, params.weight_type, stream);
}

cudaError_t launch_gated_rms_norm_backward(const GatedRmsNormBackwardParams& params, cudaStream_t stream) {
  return run_typed(params, params.forward.type, params.forward.weight_type, stream);
}

}  // namespace sluice
