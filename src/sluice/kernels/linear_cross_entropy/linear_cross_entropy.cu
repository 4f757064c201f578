// SPDX-License-Identifier: Apache-2.0
// Bound by memory: forward reads each logit once, backward reads it once and writes its gradient once. Forward gives a
// row to a block, whose threads keep a running maximum, sum of exponentials and argmax of their share and merge them in
// a fixed order. Backward is element by element, eight neighbours a thread where the row's length allows it.
#include <cuda_bf16.h>

#include <cmath>

#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/linear_cross_entropy/params.h"

namespace sluice {
namespace {

constexpr int kThreads = 512;
constexpr int kGradientThreads = 256;
constexpr int64_t kIgnored = -100, kElsewhere = -1;

// What is known of a part of a row: sum = sum of exp(x - max), weighted = sum of exp(x - max) (x - max), argmax = the
// first place of max.
struct Running {
  float max, sum, weighted;
  int64_t argmax;
};

// The same with a larger max. An empty part has max -infinity and sum 0; -infinity minus itself would be NaN.
__device__ Running raise(const Running& part, float max) {
  if (part.sum == 0.f) return {max, 0.f, 0.f, part.argmax};
  const float below = part.max - max, weight = __expf(below);
  return {max, part.sum * weight, weight * (part.weighted + below * part.sum), part.argmax};
}

__device__ Running merge(const Running& a, const Running& b) {
  const bool b_leads = b.max > a.max || (b.max == a.max && b.argmax < a.argmax);
  const Running& top = b_leads ? b : a;
  const Running other = raise(b_leads ? a : b, top.max);
  return {top.max, top.sum + other.sum, top.weighted + other.weighted, top.argmax};
}

template <int kLanes>
__device__ void take(Running& running, const Lanes<float, kLanes>& x, int64_t first) {
  float top = x.value[0];
#pragma unroll
  for (int i = 1; i < kLanes; ++i) top = fmaxf(top, x.value[i]);
  if (top > running.max) {
    running = raise(running, top);
#pragma unroll
    for (int i = kLanes - 1; i >= 0; --i) {
      if (x.value[i] == top) running.argmax = first + i;
    }
  }
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const float below = x.value[i] - running.max, weight = __expf(below);
    running.sum += weight;
    running.weighted += weight * below;
  }
}

template <int kLanes>
__global__ __launch_bounds__(kThreads) void summarize(const __grid_constant__ LogitsParams params) {
  const int row = blockIdx.x;
  const int64_t target = params.targets[row];
  const float* x = params.logits + row * params.vocabulary;
  if (target == kIgnored) {
    if (threadIdx.x == 0) {
      params.nll[row] = params.lse[row] = 0.f;
      if (params.entropy) params.entropy[row] = 0.f;
      params.predicted[row] = kIgnored;
    }
    return;
  }
  Running running{-INFINITY, 0.f, 0.f, INT64_MAX};
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kLanes; i < params.vocabulary; i += kThreads * kLanes) {
    auto logits = Lanes<float, kLanes>::load(x + i);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) logits.value[lane] *= params.scale;
    take(running, logits, i);
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    running =
        merge(running, {__shfl_xor_sync(~0u, running.max, mask), __shfl_xor_sync(~0u, running.sum, mask),
                        __shfl_xor_sync(~0u, running.weighted, mask), __shfl_xor_sync(~0u, running.argmax, mask)});
  }
  __shared__ Running warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = running;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads / 32; ++i) running = merge(running, warps[i]);
  const float log_sum = logf(running.sum);
  const bool known = target >= 0 && target < params.vocabulary;
  const float target_logit = known ? params.scale * x[target] : target == kElsewhere ? 0.f : NAN;
  params.lse[row] = running.max + log_sum;
  params.nll[row] = log_sum + (running.max - target_logit);
  if (params.entropy) params.entropy[row] = log_sum - running.weighted / running.sum;
  params.predicted[row] = running.argmax;
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kGradientThreads) void differentiate(const __grid_constant__ LogitGradientsParams params) {
  const int row = blockIdx.x;
  const int64_t target = params.targets[row];
  const float lse = params.lse[row], grad = target == kIgnored ? 0.f : params.scale * params.grad_nll[row];
  const bool entropies = params.grad_entropy != nullptr && target != kIgnored;
  const float entropy = entropies ? params.entropy[row] : 0.f,
              grad_entropy = entropies ? params.scale * params.grad_entropy[row] : 0.f;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kGradientThreads + threadIdx.x) * kLanes;
  if (first >= params.vocabulary) return;
  const auto x = Lanes<float, kLanes>::load(params.logits + row * params.vocabulary + first);
  float gradient[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const float log_p = fminf(params.scale * x.value[i] - lse, 0.f), p = __expf(log_p);  // rounding may put it above
    const float of_nll = grad * (p - (first + i == target ? 1.f : 0.f));
    // Exactly 0 where ignored, whatever the hidden state.
    gradient[i] = target == kIgnored ? 0.f : of_nll - grad_entropy * p * (log_p + entropy);
  }
  narrow<T>(gradient).store(static_cast<T*>(params.gradients) + row * params.vocabulary + first);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T>
void differentiate_all(const LogitGradientsParams& params, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int lanes) {
    const int64_t columns = static_cast<int64_t>(kGradientThreads) * lanes;
    const dim3 blocks(params.tokens, static_cast<unsigned>((params.vocabulary + columns - 1) / columns));
    kernel<<<blocks, kGradientThreads, 0, stream>>>(params);
  };
  const bool wide = params.vocabulary % 4 == 0 && aligned(params.logits) && aligned(params.gradients);
  if (wide) launch(differentiate<T, 4>, 4);
  else launch(differentiate<T, 1>, 1);
}

}  // namespace

cudaError_t launch_logits(const LogitsParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  if (params.vocabulary % 4 == 0 && aligned(params.logits))
    summarize<4><<<params.tokens, kThreads, 0, stream>>>(params);
  else summarize<1><<<params.tokens, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_logit_gradients(const LogitGradientsParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  if (params.bfloat16) differentiate_all<__nv_bfloat16>(params, stream);
  else differentiate_all<float>(params, stream);
  return cudaGetLastError();
}

}  // namespace sluice
