// SPDX-License-Identifier: Apache-2.0
// Bound by memory: a thread owns some neighbouring channels and walks a strip of tokens, with the rows that
// a token sees in registers and the rows to come on their way to shared memory; each element is read and written once,
// but for the 3 rows around a strip. With s the sum before the activation:
//   ds_t = dy_t a'(s_t)    dx_t = sum over m < 4 of weight_{3-m} ds_{t+m}    dw_j = sum of ds_t u_{t-3+j}
// A strip's share of dw goes to a scratch row of its own; a second kernel adds these in their order. Where the gradient
// of x takes the place of x, the rows around each strip, which its neighbours overwrite, are copied first.
#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "sluice/kernels/causal_conv/params.h"
#include "sluice/kernels/common/column_sums.cuh"
#include "sluice/kernels/common/packing.cuh"
#include "sluice/kernels/common/vector_launch.cuh"

namespace sluice {
namespace {

constexpr int kWidth = 4;
constexpr int kBefore = kWidth - 1;  // rows that a token sees besides its own
constexpr int kThreads = 128;
constexpr int kResident = 4;  // blocks a multiprocessor, for the registers of the backward pass
constexpr int kBatch = 4;     // tokens whose rows are loaded together
constexpr int kForwardStrip = 32;
constexpr int kBackwardStrip = 32;  // at least
constexpr int kMaxStrips = 256;
constexpr int kLanesOfVectors = 4;  // channels of a thread: 8 leave registers for few warps

int backward_strip(int tokens) {
  const int length = std::max(kBackwardStrip, (tokens + kMaxStrips - 1) / kMaxStrips);
  return (length + kBatch - 1) / kBatch * kBatch;
}

__device__ PackView pack_of(const CausalConvParams& params) {
  return {params.cu_seqlens, params.sequences, params.tokens};
}

// What a thread's channels need: weights and, of the token under way, the rows before it.
template <typename T, typename Weight, int kLanes>
struct Channels {
  const CausalConvParams& params;
  int channel;              // the first
  const T* halo = nullptr;  // rows of x around the strip, where x does not hold them any more
  int first = 0, last = 0;  // of the strip; with a halo
  float weight[kLanes][kWidth];
  float before[kBefore][kLanes];  // oldest first

  __device__ Channels(const CausalConvParams& p, int own) : params(p), channel(own) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto taps =
          Lanes<Weight, kWidth>::load(static_cast<const Weight*>(params.weight) + (channel + lane) * kWidth);
#pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) weight[lane][tap] = widen(taps.value[tap]);
    }
  }

  __device__ const T* row(int token) const {
    if (halo && token < first) return halo + (token - first + kBefore) * params.channels + channel;
    if (halo && token >= last) return halo + (token - last + kBefore) * params.channels + channel;
    return static_cast<const T*>(params.x) + token * params.x_stride + channel;
  }
  // The rows before `token` of a sequence.
  __device__ void load_before(int sequence, int begin, int token) {
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
      const int at = token - kBefore + j;
      if (at >= begin) {
        const auto lanes = Lanes<T, kLanes>::load(row(at));
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) before[j][lane] = widen(lanes.value[lane]);
      } else {
        const T* state = static_cast<const T*>(params.initial_state);
        const int64_t first = (static_cast<int64_t>(sequence) * params.channels + channel) * kBefore;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane)
          before[j][lane] = state ? widen(state[first + lane * kBefore + at - begin + kBefore]) : 0.f;
      }
    }
  }
  __device__ float sum(int lane, float own) const {
    float sum = weight[lane][kBefore] * own;
#pragma unroll
    for (int j = 0; j < kBefore; ++j) sum += weight[lane][j] * before[j][lane];
    return sum;
  }
  __device__ void shift(int lane, float own) {
#pragma unroll
    for (int j = 0; j + 1 < kBefore; ++j) before[j][lane] = before[j + 1][lane];
    before[kBefore - 1][lane] = own;
  }
};

// The rows of a batch of tokens.
template <typename T, int kLanes>
struct Batch {
  Lanes<T, kLanes> row[kBatch];
};

// Batches on their way from `kSources` tensors, those of a thread in places of shared memory that no other touches: it
// waits for its own copies alone.
template <typename T, int kLanes, int kSources>
struct BatchQueue {
  using Row = Lanes<T, kLanes>;
  static constexpr int kBytes = 32 * 1024;  // of kResident blocks on a multiprocessor
  static constexpr int kPlaces = std::min(4, kBytes / static_cast<int>(kSources * kBatch * kThreads * sizeof(Row)));
  static_assert(kPlaces >= 2, "a batch on its way while one is worked on");
  Row rows[kPlaces][kSources][kBatch][kThreads];

  // The first `count` of a batch.
  __device__ void load(int place, int source, const T* from, int64_t stride, int count) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Row& to = rows[place][source][i][threadIdx.x];
      if (i < count) {
        if constexpr (sizeof(Row) >= 4) __pipeline_memcpy_async(&to, from, sizeof(Row));
        else to = Row::load(from);
      }
      from += stride;
    }
  }
  // A batch of all sources has been asked for, and maybe none is left.
  __device__ void commit() { __pipeline_commit(); }
  // Until the oldest batch is there, of kPlaces - 1 under way.
  __device__ void wait() { __pipeline_wait_prior(kPlaces - 2); }
  __device__ Batch<T, kLanes> take(int place, int source) const {
    Batch<T, kLanes> batch;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch.row[i] = rows[place][source][i][threadIdx.x];
    return batch;
  }
};

template <typename T, typename Weight, int kLanes>
__global__ __launch_bounds__(kThreads) void convolve(const __grid_constant__ CausalConvParams params) {
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * kLanes;
  if (channel >= params.channels) return;
  const int first = blockIdx.y * kForwardStrip, last = min(first + kForwardStrip, params.tokens);
  const PackView pack = pack_of(params);
  Channels<T, Weight, kLanes> channels(params, channel);
  using Queue = BatchQueue<T, kLanes, 1>;
  __shared__ Queue queue;
  const auto load = [&](int place, int base) {
    queue.load(place, 0, channels.row(base), params.x_stride, last - base);
    queue.commit();
  };
  for (int place = 0; place + 1 < Queue::kPlaces; ++place) load(place, first + place * kBatch);
  SequenceCursor cursor(pack, first);
  channels.load_before(cursor.sequence, cursor.span.first, first);
  T* out = static_cast<T*>(params.out) + static_cast<int64_t>(first) * params.channels + channel;
  const auto put = [&](const Lanes<T, kLanes>& row) {
    float result[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float own = widen(row.value[lane]), sum = channels.sum(lane, own);
      result[lane] = params.silu ? sum * sigmoid<T>(sum).value : sum;
      channels.shift(lane, own);
    }
    narrow<T>(result).store(out);
    out += params.channels;
  };
  int place = 0;
  for (int base = first; base < last; base += kBatch) {
    queue.wait();
    const auto rows = queue.take(place, 0);
    load((place + Queue::kPlaces - 1) % Queue::kPlaces, base + (Queue::kPlaces - 1) * kBatch);
    place = (place + 1) % Queue::kPlaces;
    if (base + kBatch <= min(last, cursor.span.last)) {  // no sequence begins in it
#pragma unroll
      for (int i = 0; i < kBatch; ++i) put(rows.row[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (base + i >= last) break;
        if (cursor.advance(pack, base + i)) channels.load_before(cursor.sequence, base + i, base + i);
        put(rows.row[i]);
      }
    }
  }
}

// The rows that each sequence leaves, and the check of the boundaries. A thread a sequence and channel.
template <typename T>
__global__ void keep_state(const __grid_constant__ CausalConvParams params) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const PackView pack = pack_of(params);
  for (int sequence = blockIdx.y; sequence < params.sequences; sequence += gridDim.y) {
    if (channel == 0) check_span("causal_conv", pack, sequence);
    if (channel >= params.channels) continue;
    const Span span = sequence_span(pack, sequence);
    const int64_t state = (static_cast<int64_t>(sequence) * params.channels + channel) * kBefore;
    for (int j = 0; j < kBefore; ++j) {
      const int at = span.last - kBefore + j;
      T value = T(0.f);
      if (at >= span.first) {
        value = static_cast<const T*>(params.x)[at * params.x_stride + channel];
      } else if (params.initial_state) {
        value = static_cast<const T*>(params.initial_state)[state + at - span.first + kBefore];
      }
      static_cast<T*>(params.final_state)[state + j] = value;
    }
  }
}

// The kBefore rows before a strip and those after it. A thread a channel, a block row a strip.
template <typename T>
__global__ void copy_halo(const __grid_constant__ CausalConvBackwardParams backward, int strip) {
  const CausalConvParams& params = backward.forward;
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= params.channels) return;
  const int first = blockIdx.y * strip, last = min(first + strip, params.tokens);
  T* halo = static_cast<T*>(backward.halo) + static_cast<int64_t>(blockIdx.y) * 2 * kBefore * params.channels + channel;
#pragma unroll
  for (int i = 0; i < 2 * kBefore; ++i) {
    const int token = i < kBefore ? first - kBefore + i : last + i - kBefore;
    if (token >= 0 && token < params.tokens)
      halo[i * params.channels] = static_cast<const T*>(params.x)[token * params.x_stride + channel];
  }
}

template <typename T>
__device__ float through_activation(const CausalConvParams& params, float sum, float grad) {
  if (!params.silu) return grad;
  const Sigmoid gate = sigmoid<T>(sum);
  return grad * (gate.value + sum * gate.value * gate.complement);
}

// A row that the final state keeps takes its gradient too.
template <typename T, int kLanes>
__device__ void add_kept(const CausalConvBackwardParams& backward, const PackView& pack, int token, int channel,
                         float (&grad)[kLanes]) {
  const SequenceCursor owner(pack, token);
  const int kept = token - (owner.span.last - kBefore);
  if (kept < 0) return;
  const T* state = static_cast<const T*>(backward.grad_final_state) +
                   (static_cast<int64_t>(owner.sequence) * backward.forward.channels + channel) * kBefore + kept;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) grad[lane] += widen(state[lane * kBefore]);
}

template <typename T, typename Weight, int kLanes>
__global__ __launch_bounds__(kThreads, kResident) void convolve_backward(
    const __grid_constant__ CausalConvBackwardParams backward, int strip) {
  const CausalConvParams& params = backward.forward;
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * kLanes;
  if (channel >= params.channels) return;
  const int first = blockIdx.y * strip, last = min(first + strip, params.tokens);
  const PackView pack = pack_of(params);
  Channels<T, Weight, kLanes> channels(params, channel);
  if (backward.halo) {
    channels.halo =
        static_cast<const T*>(backward.halo) + static_cast<int64_t>(blockIdx.y) * 2 * kBefore * params.channels;
    channels.first = first;
    channels.last = last;
  }
  const T* grad_out = static_cast<const T*>(backward.grad_out) + channel;
  T* grad_x = static_cast<T*>(backward.grad_x) + channel;
  using Queue = BatchQueue<T, kLanes, 2>;
  __shared__ Queue queue;
  // The strip's rows, then those after it.
  const auto load = [&](int place, int base) {
    const int end = base < last ? last : min(last + kBefore, params.tokens);
    if (base < end) {
      queue.load(place, 0, channels.row(base), base >= last && channels.halo ? params.channels : params.x_stride,
                 end - base);
      queue.load(place, 1, grad_out + base * backward.grad_out_stride, backward.grad_out_stride, end - base);
    }
    queue.commit();
  };
  for (int place = 0; place + 1 < Queue::kPlaces; ++place) load(place, first + place * kBatch);
  SequenceCursor cursor(pack, first);
  channels.load_before(cursor.sequence, cursor.span.first, first);

  float weight_grad[kWidth][kLanes] = {};
  float pending[kBefore][kLanes] = {};  // gradients of the rows before the token under way, of its own strip
  // A token's row; finishes the row kBefore tokens earlier. `inside`: the token and all the rows it sees are of the
  // strip and of one sequence.
  const auto step = [&](auto inside, int token, const Lanes<T, kLanes>& row, const Lanes<T, kLanes>& grad) {
    constexpr bool kInside = decltype(inside)::value;
    const bool exists = kInside || token < params.tokens, counts = kInside || token < last;
    const int earlier = exists ? token - cursor.span.first : 0;  // tokens of the sequence before this one
    float finished[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      float sum_grad = 0.f;
      if (exists) {
        const float own = widen(row.value[lane]);
        sum_grad = through_activation<T>(params, channels.sum(lane, own), widen(grad.value[lane]));
        if (counts) {
#pragma unroll
          for (int j = 0; j < kBefore; ++j) weight_grad[j][lane] += sum_grad * channels.before[j][lane];
          weight_grad[kBefore][lane] += sum_grad * own;
        }
        channels.shift(lane, own);
      }
#pragma unroll
      for (int j = 0; j < kBefore; ++j) {
        if (kInside || earlier >= kBefore - j) pending[j][lane] += channels.weight[lane][j] * sum_grad;
      }
      finished[lane] = pending[0][lane];
#pragma unroll
      for (int j = 0; j + 1 < kBefore; ++j) pending[j][lane] = pending[j + 1][lane];
      pending[kBefore - 1][lane] = channels.weight[lane][kBefore] * sum_grad;
    }
    const int done = token - kBefore;
    if (!kInside && done < first) return;
    if (!kInside && backward.grad_final_state) add_kept<T>(backward, pack, done, channel, finished);
    narrow<T>(finished).store(grad_x + done * backward.grad_x_stride);
  };
  int place = 0;
  for (int base = first; base < last + kBefore; base += kBatch) {
    queue.wait();
    const auto rows = queue.take(place, 0), grads = queue.take(place, 1);
    load((place + Queue::kPlaces - 1) % Queue::kPlaces, base + (Queue::kPlaces - 1) * kBatch);
    place = (place + 1) % Queue::kPlaces;
    const int begin = max(first, cursor.span.first), end = min(last, cursor.span.last);
    if (base - kBefore >= begin && base + kBatch <= end && !backward.grad_final_state) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) step(std::true_type{}, base + i, rows.row[i], grads.row[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int token = base + i;
        if (token >= last + kBefore) break;
        if (token < params.tokens && cursor.advance(pack, token)) channels.load_before(cursor.sequence, token, token);
        step(std::false_type{}, token, rows.row[i], grads.row[i]);
      }
    }
  }
#pragma unroll
  for (int tap = 0; tap < kWidth; ++tap) {
    float* destination = backward.partial + (static_cast<int64_t>(blockIdx.y) * kWidth + tap) * params.channels;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) destination[channel + lane] = weight_grad[tap][lane];
  }
}

// grad_weight from the strips' shares.
template <typename Weight>
__global__ void add_shares(const __grid_constant__ CausalConvBackwardParams backward, int strips) {
  const int channels = backward.forward.channels, columns = kWidth * channels;
  const float sum = column_sum(backward.partial, strips, columns);
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  if (threadIdx.y > 0 || column >= columns) return;
  static_cast<Weight*>(backward.grad_weight)[column % channels * kWidth + column / channels] = Weight(sum);
}

// The gradient of the rows before a sequence reaches them through its first tokens; or, where it is shorter than the
// state, from the rows of the final state that still hold them. A thread a sequence and channel.
template <typename T, typename Weight>
__global__ void initial_state_backward(const __grid_constant__ CausalConvBackwardParams backward) {
  const CausalConvParams& params = backward.forward;
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= params.channels) return;
  Channels<T, Weight, 1> channels(params, channel);
  for (int sequence = blockIdx.y; sequence < params.sequences; sequence += gridDim.y) {
    const Span span = sequence_span(pack_of(params), sequence);
    const int64_t state = (static_cast<int64_t>(sequence) * params.channels + channel) * kBefore;
    channels.load_before(sequence, span.first, span.first);
    const int length = span.last - span.first;
    float grad[kBefore] = {};
#pragma unroll
    for (int token = 0; token < kBefore; ++token) {
      if (token >= length) break;
      const float own = widen(*channels.row(span.first + token));
      const T* grad_out = static_cast<const T*>(backward.grad_out) + channel;
      const float sum_grad = through_activation<T>(params, channels.sum(0, own),
                                                   widen(grad_out[(span.first + token) * backward.grad_out_stride]));
#pragma unroll
      for (int j = token; j < kBefore; ++j) grad[j] += channels.weight[0][j - token] * sum_grad;
      channels.shift(0, own);
    }
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
      if (backward.grad_final_state && j >= length)
        grad[j] += widen(static_cast<const T*>(backward.grad_final_state)[state + j - length]);
      static_cast<T*>(backward.grad_initial_state)[state + j] = T(grad[j]);
    }
  }
}

constexpr int kMaxGridY = 65535;

dim3 state_grid(const CausalConvParams& params) {
  return dim3(blocks_for(params.channels, kThreads), std::min(params.sequences, kMaxGridY));
}

template <typename T, typename Weight, int kLanes>
void run(const CausalConvParams& params, cudaStream_t stream) {
  const dim3 grid(blocks_for(params.channels, kThreads * kLanes), blocks_for(params.tokens, kForwardStrip));
  convolve<T, Weight, kLanes><<<grid, kThreads, 0, stream>>>(params);
}
template <typename T, typename Weight>
void run(const CausalConvParams& params, cudaStream_t stream) {
  if (params.sequences > 0) keep_state<T><<<state_grid(params), kThreads, 0, stream>>>(params);
  if (params.tokens == 0) return;
  if (in_vectors<T>(params.channels, {params.x, params.out}, {params.x_stride})) {
    run<T, Weight, kLanesOfVectors>(params, stream);
  } else {
    run<T, Weight, 1>(params, stream);
  }
}

template <typename T, typename Weight, int kLanes>
void run_backward(const CausalConvBackwardParams& params, int strip, int strips, cudaStream_t stream) {
  const dim3 grid(blocks_for(params.forward.channels, kThreads * kLanes), strips);
  convolve_backward<T, Weight, kLanes><<<grid, kThreads, 0, stream>>>(params, strip);
}
template <typename T, typename Weight>
void run(const CausalConvBackwardParams& params, cudaStream_t stream) {
  const CausalConvParams& forward = params.forward;
  const int strip = backward_strip(forward.tokens), strips = causal_conv_strips(forward.tokens);
  if (params.grad_initial_state && forward.sequences > 0)
    initial_state_backward<T, Weight><<<state_grid(forward), kThreads, 0, stream>>>(params);
  if (strips > 0) {
    if (params.halo)
      copy_halo<T><<<dim3(blocks_for(forward.channels, kThreads), strips), kThreads, 0, stream>>>(params, strip);
    if (in_vectors<T>(forward.channels, {forward.x, params.grad_out, params.grad_x},
                      {forward.x_stride, params.grad_out_stride, params.grad_x_stride})) {
      run_backward<T, Weight, kLanesOfVectors>(params, strip, strips, stream);
    } else {
      run_backward<T, Weight, 1>(params, strip, strips, stream);
    }
  }
  add_shares<Weight><<<column_sum_blocks(kWidth * forward.channels), column_sum_threads(), 0, stream>>>(params, strips);
}

template <typename Params>
cudaError_t run_typed(const Params& params, ConvType type, ConvType weight_type, cudaStream_t stream) {
  if (type == ConvType::kFp32) {
    run<float, float>(params, stream);
  } else if (weight_type == ConvType::kFp32) {
    run<__nv_bfloat16, float>(params, stream);
  } else {
    run<__nv_bfloat16, __nv_bfloat16>(params, stream);
  }
  return cudaGetLastError();
}

}  // namespace

int32_t causal_conv_strips(int32_t tokens) { return static_cast<int32_t>(blocks_for(tokens, backward_strip(tokens))); }

cudaError_t launch_causal_conv(const CausalConvParams& params, cudaStream_t stream) {
  if (params.channels == 0) return cudaSuccess;
  return run_typed(params, params.type, params.weight_type, stream);
}

cudaError_t launch_causal_conv_backward(const CausalConvBackwardParams& params, cudaStream_t stream) {
  if (params.forward.channels == 0) return cudaSuccess;
  return run_typed(params, params.forward.type, params.forward.weight_type, stream);
}

}  // namespace sluice
