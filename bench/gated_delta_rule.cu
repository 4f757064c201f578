// SPDX-License-Identifier: Apache-2.0
// The kernels of the gated delta rule without torch: both passes as CUDA graphs, times in ms and sums of the results.
// Starts in a second, so that many builds can be compared in one short use of a card, and sanitizers get through.
//
//   bench_gated_delta_rule [--once] KEY_HEADS,VALUE_HEADS,TOKENS[,SEQUENCES]...
//
// --once: each pass once, untimed, for compute-sanitizer. Equal sums of two builds mean equal bits, very likely.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "sluice/kernels/gated_delta_rule/params.h"

namespace {

using sluice::GatedDeltaBackwardParams;
using sluice::GatedDeltaParams;
using bf16 = __nv_bfloat16;

constexpr int kDim = 128, kBlocks = 1024, kThreads = 256;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
struct Buffer {
  size_t count;
  T* data = nullptr;
  explicit Buffer(size_t elements) : count(elements) {
    check(cudaMalloc(&data, std::max<size_t>(1, elements) * sizeof(T)), "cudaMalloc");
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
};

__device__ uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
// In (0, 1), by place and seed.
__device__ float uniform(uint64_t place, uint64_t seed) {
  return (static_cast<float>(mix(place + mix(seed)) >> 40) + 0.5f) * 0x1p-24f;
}
__device__ float normal(uint64_t place, uint64_t seed) {
  return sqrtf(-2 * logf(uniform(2 * place, seed))) * cospif(2 * uniform(2 * place + 1, seed));
}

__global__ void fill_normal(bf16* x, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < count; i += size_t{kBlocks} * kThreads) {
    x[i] = __float2bfloat16(normal(i, seed));
  }
}
// As in a trained model: each head has a decay of its own, from hardly any to a few tokens.
__global__ void fill_gates(float* g, float* beta, size_t count, int heads) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < count; i += size_t{kBlocks} * kThreads) {
    g[i] = -(0.01f + 16 * uniform(i % heads, 5)) * log1pf(expf(normal(i, 6) - 3));
    beta[i] = uniform(i, 7);
  }
}

template <typename T>
double weighted_sum(const Buffer<T>& x) {
  std::vector<T> host(x.count);
  check(cudaMemcpy(host.data(), x.data, x.count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  double sum = 0;
  for (size_t i = 0; i < host.size(); ++i) sum += static_cast<double>(static_cast<float>(host[i])) * (1 + i % 7);
  return sum;
}

// Median of some replays; 0 with `once`.
template <typename Pass>
float time_ms(bool once, const Pass& pass) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  std::vector<float> times{0};
  if (once) {
    pass(stream);
  } else {
    cudaGraph_t graph;
    cudaGraphExec_t work;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    pass(stream);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&work, graph, 0), "cudaGraphInstantiate");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    times.clear();
    for (int i = -3; i < 15; ++i) {  // three for warmth
      check(cudaEventRecord(begin, stream), "cudaEventRecord");
      check(cudaGraphLaunch(work, stream), "cudaGraphLaunch");
      check(cudaEventRecord(end, stream), "cudaEventRecord");
      check(cudaEventSynchronize(end), "a pass");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      if (i >= 0) times.push_back(ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(work);
    cudaGraphDestroy(graph);
  }
  check(cudaStreamSynchronize(stream), "a pass");
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void run(int key_heads, int value_heads, int tokens, int sequences, bool once) {
  const size_t keys = size_t{1} * tokens * key_heads * kDim, values = size_t{1} * tokens * value_heads * kDim,
               gates = size_t{1} * tokens * value_heads;
  Buffer<bf16> q(keys), k(keys), v(values), out(values), grad_out(values), grad_q(keys), grad_k(keys), grad_v(values);
  Buffer<float> g(gates), beta(gates), grad_g(gates), grad_beta(gates);
  uint64_t seed = 1;
  for (auto* x : {&q, &k, &v, &grad_out}) fill_normal<<<kBlocks, kThreads>>>(x->data, x->count, seed++);
  fill_gates<<<kBlocks, kThreads>>>(g.data, beta.data, gates, value_heads);
  std::vector<int> bounds;  // of unequal sequences
  for (int64_t i = 0; i <= sequences; ++i) {
    const int shift = i == 0 || i == sequences ? 0 : static_cast<int>(i * 37 % 29 % std::max(1, tokens / sequences));
    bounds.push_back(static_cast<int>(i * tokens / sequences) + shift);
  }
  Buffer<int> cu_seqlens(bounds.size());
  check(cudaMemcpy(cu_seqlens.data, bounds.data(), bounds.size() * sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");

  GatedDeltaParams params{.q = q.data,
                          .k = k.data,
                          .v = v.data,
                          .g = g.data,
                          .beta = beta.data,
                          .cu_seqlens = cu_seqlens.data,
                          .tokens = tokens,
                          .sequences = sequences,
                          .key_heads = key_heads,
                          .value_heads = value_heads,
                          .key_dim = kDim,
                          .value_dim = kDim,
                          .q_stride = key_heads * kDim,
                          .k_stride = key_heads * kDim,
                          .v_stride = value_heads * kDim,
                          .scale = 0.0883883476f,
                          .qk_l2norm = true,
                          .out = out.data};
  Buffer<char> workspace(std::max(sluice::gated_delta_rule_workspace_bytes(params),
                                  sluice::gated_delta_rule_backward_workspace_bytes(params)));
  Buffer<float> checkpoints(size_t{1} * sluice::gated_delta_rule_checkpoints(params) * value_heads * kDim * kDim);
  params.workspace = workspace.data;
  params.checkpoints = checkpoints.data;
  const GatedDeltaBackwardParams backward{.forward = params,
                                          .grad_out = grad_out.data,
                                          .grad_out_stride = value_heads * kDim,
                                          .grad_q_stride = key_heads * kDim,
                                          .grad_k_stride = key_heads * kDim,
                                          .grad_v_stride = value_heads * kDim,
                                          .grad_q = grad_q.data,
                                          .grad_k = grad_k.data,
                                          .grad_v = grad_v.data,
                                          .grad_g = grad_g.data,
                                          .grad_beta = grad_beta.data};
  cudaStream_t beside;
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&beside, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  check(cudaDeviceSynchronize(), "inputs");

  const auto forward = [&](cudaStream_t stream) {
    check(sluice::launch_gated_delta_rule_sm90(params, stream), "forward");
  };
  const float forward_ms = time_ms(once, forward);
  const float both_ms = time_ms(once, [&](cudaStream_t stream) {
    forward(stream);
    check(sluice::launch_gated_delta_rule_backward_sm90(backward, stream, beside), "backward");
  });
  cudaStreamDestroy(beside);
  std::printf("%dk/%dv, %d tokens, %d sequences: forward %.4f both %.4f ms; sums %.8g %.8g %.8g %.8g %.8g %.8g\n",
              key_heads, value_heads, tokens, sequences, forward_ms, both_ms, weighted_sum(out), weighted_sum(grad_q),
              weighted_sum(grad_k), weighted_sum(grad_v), weighted_sum(grad_g), weighted_sum(grad_beta));
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  const bool once = count > 1 && std::strcmp(arguments[1], "--once") == 0;
  for (int i = once ? 2 : 1; i < count; ++i) {
    int key_heads = 0, value_heads = 0, tokens = 0, sequences = 1;
    const int found = std::sscanf(arguments[i], "%d,%d,%d,%d", &key_heads, &value_heads, &tokens, &sequences);
    if (found < 3 || key_heads < 1 || value_heads % key_heads != 0 || tokens < 1 || sequences < 1) {
      std::fprintf(stderr, "%s: expected KEY_HEADS,VALUE_HEADS,TOKENS[,SEQUENCES]\n", arguments[i]);
      return 2;
    }
    run(key_heads, value_heads, tokens, sequences, once);
  }
}
