// SPDX-License-Identifier: Apache-2.0
// Bound by memory: each element is read and written once. A row is held in registers, in vectors of 16 bytes, by a warp
// (up to 128 vectors) or by a block (up to 1,024); any other row is walked element by element by a warp, from memory.
// With r = 1 / sqrt(mean(x^2) + eps), s = 1 + w or w and g the gradient that comes in:
//   dx = r (g s - x r^2 mean(g s x))      dw = sum over rows of g x r
// A block of the backward pass adds up dw of its rows in registers and leaves one row of sums; a second kernel adds
// those in order.
#include <algorithm>

#include "sluice/kernels/common/column_sums.cuh"
#include "sluice/kernels/common/vector_launch.cuh"
#include "sluice/kernels/rms_norm/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1056;  // of the backward pass: eight a multiprocessor

template <typename T>
__device__ const T* row_of(const RmsNormRows& rows, int64_t row, int heads) {
  return static_cast<const T*>(rows.data) + row / heads * rows.token_stride + row % heads * rows.head_stride;
}

// The row's weights, as the place of the first.
__device__ int weight_of(const RmsNormParams& params, int64_t row) {
  return static_cast<int>(row % params.weight_heads) * params.width;
}

// s of one weight.
__device__ float scale_of(const RmsNormParams& params, int place) {
  const float weight = params.bfloat16_weight ? widen(static_cast<const __nv_bfloat16*>(params.weight)[place])
                                              : static_cast<const float*>(params.weight)[place];
  return params.zero_centered ? 1.f + weight : weight;
}

__device__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// Over the kGroup threads of a row: a warp, or the block.
template <int kGroup>
__device__ float group_sum(float x) {
  x = warp_sum(x);
  if constexpr (kGroup > 32) {
    __shared__ float sums[kGroup / 32];
    __syncthreads();  // those of the sum before have been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.f;
#pragma unroll
    for (int i = 0; i < kGroup / 32; ++i) x += sums[i];
  }
  return x;
}

// 1 / sqrt(mean(x^2) + eps); 0 where the squares overflow.
__device__ float inverse_rms(float squares, const RmsNormParams& params) {
  return 1.f / sqrtf(squares / static_cast<float>(params.width) + params.eps);
}

template <typename T>
__device__ float scaled(float x, float r, float scale, bool zero_centered) {
  return scale * (zero_centered ? x * r : widen(T(x * r)));
}

// A row of kPieces vectors for each of kGroup threads; those past the row's end are left out.
template <typename T, int kGroup, int kPieces>
__global__ __launch_bounds__(kThreads) void normalize(const __grid_constant__ RmsNormParams params) {
  constexpr int kLanes = kVector<T>, kStep = kGroup * kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= params.rows) return;  // the whole group
  const int first = threadIdx.x % kGroup * kLanes;
  const T* source = row_of<T>(params.x, row, params.heads);
  Lanes<T, kLanes> x[kPieces] = {};
  float squares = 0.f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (first + p * kStep < params.width) x[p] = Lanes<T, kLanes>::load(source + first + p * kStep);
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) squares += widen(x[p].value[i]) * widen(x[p].value[i]);
  }
  const float r = inverse_rms(group_sum<kGroup>(squares), params);
  T* out = static_cast<T*>(params.out) + row * params.width;
  const int weight = weight_of(params, row);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int column = first + p * kStep;
    if (column >= params.width) continue;
    float y[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      y[i] = scaled<T>(widen(x[p].value[i]), r, scale_of(params, weight + column + i), params.zero_centered);
    }
    narrow<T>(y).store(out + column);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void normalize_any(const __grid_constant__ RmsNormParams params) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= params.rows) return;
  const int lane = threadIdx.x % 32;
  const T* x = row_of<T>(params.x, row, params.heads);
  T* out = static_cast<T*>(params.out) + row * params.width;
  float squares = 0.f;
  for (int i = lane; i < params.width; i += 32) squares += widen(x[i]) * widen(x[i]);
  const float r = inverse_rms(warp_sum(squares), params);
  const int weight = weight_of(params, row);
  for (int i = lane; i < params.width; i += 32) {
    out[i] = T(scaled<T>(widen(x[i]), r, scale_of(params, weight + i), params.zero_centered));
  }
}

// Groups take the rows in turn, those of one head's weights (blockIdx.y).
template <typename T, int kGroup, int kPieces>
__global__ __launch_bounds__(kThreads) void normalize_backward(const __grid_constant__ RmsNormBackwardParams backward) {
  constexpr int kLanes = kVector<T>, kStep = kGroup * kLanes, kGroups = kThreads / kGroup;
  const RmsNormParams& params = backward.forward;
  const int weights = blockIdx.y * params.width;
  const int group = threadIdx.x / kGroup, first = threadIdx.x % kGroup * kLanes;
  float scale[kPieces][kLanes] = {}, weight_grad[kPieces][kLanes] = {};
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int column = first + p * kStep + i;
      if (column < params.width) scale[p][i] = scale_of(params, weights + column);
    }
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups * params.weight_heads;
  for (int64_t row = (static_cast<int64_t>(blockIdx.x) * kGroups + group) * params.weight_heads + blockIdx.y;
       row < params.rows; row += step) {
    const T* x_row = row_of<T>(params.x, row, params.heads);
    const T* grad_row = row_of<T>(backward.grad_out, row, params.heads);
    Lanes<T, kLanes> x[kPieces] = {}, grad[kPieces] = {};
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (first + p * kStep >= params.width) continue;
      x[p] = Lanes<T, kLanes>::load(x_row + first + p * kStep);
      grad[p] = Lanes<T, kLanes>::load(grad_row + first + p * kStep);
    }
    float squares = 0.f, dot = 0.f;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float value = widen(x[p].value[i]);
        squares += value * value;
        dot += widen(grad[p].value[i]) * scale[p][i] * value;
      }
    }
    const float r = inverse_rms(group_sum<kGroup>(squares), params);
    const float sum = group_sum<kGroup>(dot);
    const float along = r > 0.f ? sum * r * r / static_cast<float>(params.width) : 0.f;  // r = 0: squares overflowed
    T* out = static_cast<T*>(backward.grad_x) + row * params.width;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      float grad_x[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float g = widen(grad[p].value[i]), value = widen(x[p].value[i]);
        grad_x[i] = r * (g * scale[p][i] - value * along);
        weight_grad[p][i] += g * (value * r);
      }
      if (first + p * kStep < params.width) narrow<T>(grad_x).store(out + first + p * kStep);
    }
  }
  // The groups' sums, added in order.
  __shared__ float shares[kGroups > 1 ? kGroups : 1][kGroups > 1 ? kStep : 1];
  float* share = backward.partial + static_cast<int64_t>(blockIdx.x) * params.weight_heads * params.width + weights;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (first + p * kStep + i < params.width) share[first + p * kStep + i] = weight_grad[p][i];
      }
    } else {
      __syncthreads();  // the piece before has been read
#pragma unroll
      for (int i = 0; i < kLanes; ++i) shares[group][first + i] = weight_grad[p][i];
      __syncthreads();
      for (int i = threadIdx.x; i < kStep && p * kStep + i < params.width; i += kThreads) {
        float sum = 0.f;
        for (int g = 0; g < kGroups; ++g) sum += shares[g][i];
        share[p * kStep + i] = sum;
      }
    }
  }
}

// A block is one warp, and a lane owns its columns of the block's sums.
template <typename T>
__global__ __launch_bounds__(32) void normalize_any_backward(const __grid_constant__ RmsNormBackwardParams backward) {
  const RmsNormParams& params = backward.forward;
  const int weights = blockIdx.y * params.width;
  float* share = backward.partial + static_cast<int64_t>(blockIdx.x) * params.weight_heads * params.width + weights;
  for (int i = threadIdx.x; i < params.width; i += 32) share[i] = 0.f;
  const int64_t step = static_cast<int64_t>(gridDim.x) * params.weight_heads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * params.weight_heads + blockIdx.y; row < params.rows;
       row += step) {
    const T* x = row_of<T>(params.x, row, params.heads);
    const T* grad = row_of<T>(backward.grad_out, row, params.heads);
    T* out = static_cast<T*>(backward.grad_x) + row * params.width;
    float squares = 0.f, dot = 0.f;
    for (int i = threadIdx.x; i < params.width; i += 32) {
      const float value = widen(x[i]);
      squares += value * value;
      dot += widen(grad[i]) * scale_of(params, weights + i) * value;
    }
    const float r = inverse_rms(warp_sum(squares), params);
    const float sum = warp_sum(dot);
    const float along = r > 0.f ? sum * r * r / static_cast<float>(params.width) : 0.f;
    for (int i = threadIdx.x; i < params.width; i += 32) {
      const float g = widen(grad[i]), value = widen(x[i]);
      out[i] = T(r * (g * scale_of(params, weights + i) - value * along));
      share[i] += g * (value * r);
    }
  }
}

__global__ void add_shares(const __grid_constant__ RmsNormBackwardParams backward, int blocks) {
  const int columns = backward.forward.weight_heads * backward.forward.width;
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  const float sum = column_sum(backward.partial, blocks, columns);
  if (threadIdx.y != 0 || column >= columns) return;
  if (backward.forward.bfloat16_weight) {
    static_cast<__nv_bfloat16*>(backward.grad_weight)[column] = __float2bfloat16(sum);
  } else {
    static_cast<float*>(backward.grad_weight)[column] = sum;
  }
}

// How a row is shared out: threads a row, vectors a thread. Zero threads: element by element.
struct Shape {
  int group, pieces;
};
template <typename T>
Shape shape_of(const RmsNormParams& params, bool vectors_fit) {
  if (!vectors_fit) return {0, 0};
  const int vectors = params.width / kVector<T>;
  for (const int group : {32, kThreads}) {
    for (const int pieces : {1, 2, 4}) {
      if (vectors <= group * pieces) return {group, pieces};
    }
  }
  return {0, 0};
}

// Calls launch.operator()<threads a row, vectors a thread>() for the shape; false where it has none.
template <typename Launch>
bool dispatch(const Shape& shape, const Launch& launch) {
  const auto with_group = [&]<int kGroup>() {
    if (shape.pieces == 1) launch.template operator()<kGroup, 1>();
    if (shape.pieces == 2) launch.template operator()<kGroup, 2>();
    if (shape.pieces == 4) launch.template operator()<kGroup, 4>();
  };
  if (shape.group == 32) with_group.template operator()<32>();
  if (shape.group == kThreads) with_group.template operator()<kThreads>();
  return shape.group > 0;
}

template <typename T>
void run(const RmsNormParams& params, cudaStream_t stream) {
  const RmsNormRows& x = params.x;
  const bool fit = in_vectors<T>(params.width, {x.data, params.out}, {x.token_stride, x.head_stride});
  const bool done = dispatch(shape_of<T>(params, fit), [&]<int kGroup, int kPieces>() {
    normalize<T, kGroup, kPieces><<<blocks_for(params.rows, kThreads / kGroup), kThreads, 0, stream>>>(params);
  });
  if (!done) normalize_any<T><<<blocks_for(params.rows, kThreads / 32), kThreads, 0, stream>>>(params);
}

template <typename T>
void run(const RmsNormBackwardParams& params, cudaStream_t stream) {
  const RmsNormParams& forward = params.forward;
  const int blocks = rms_norm_blocks(forward);
  const dim3 grid(blocks, forward.weight_heads);
  if (blocks > 0) {
    const RmsNormRows &x = forward.x, &grad = params.grad_out;
    const bool fit = in_vectors<T>(forward.width, {x.data, grad.data, params.grad_x},
                                   {x.token_stride, x.head_stride, grad.token_stride, grad.head_stride});
    const bool done = dispatch(shape_of<T>(forward, fit), [&]<int kGroup, int kPieces>() {
      normalize_backward<T, kGroup, kPieces><<<grid, kThreads, 0, stream>>>(params);
    });
    if (!done) normalize_any_backward<T><<<grid, 32, 0, stream>>>(params);
  }
  add_shares<<<column_sum_blocks(forward.weight_heads * forward.width), column_sum_threads(), 0, stream>>>(params,
                                                                                                           blocks);
}

}  // namespace

int32_t rms_norm_blocks(const RmsNormParams& params) {
  constexpr int64_t kRows = 32;  // at least
  const int64_t rows = params.rows / params.weight_heads, most = std::max(kMaxBlocks / params.weight_heads, 1);
  return static_cast<int32_t>(std::min(most, (rows + kRows - 1) / kRows));
}

cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  if (params.bfloat16) run<__nv_bfloat16>(params, stream);
  else run<float>(params, stream);
  return cudaGetLastError();
}

cudaError_t launch_rms_norm_backward(const RmsNormBackwardParams& params, cudaStream_t stream) {
  if (params.forward.bfloat16) run<__nv_bfloat16>(params, stream);
  else run<float>(params, stream);
  return cudaGetLastError();
}

}  // namespace sluice
