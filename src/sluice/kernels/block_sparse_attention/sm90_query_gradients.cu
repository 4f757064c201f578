// SPDX-License-Identifier: Apache-2.0
// The gradient of q, over query tiles, and what both gradient kernels need of each row (query, head):
//   D = dO . O    P = exp(scale S - lse), S = Q K^T    dS = P (dO V^T - D)    dQ = scale dS K
#include "sluice/kernels/block_sparse_attention/sm90_query_walk.cuh"
#include "sluice/kernels/common/shared_memory.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kRowSumThreads = 256;

// A warp a row.
__global__ __launch_bounds__(kRowSumThreads) void row_sums(const __grid_constant__ SparseBackwardParams params,
                                                           const __grid_constant__ SparseWorkspace workspace) {
  const SparseParams& forward = params.forward;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kRowSumThreads / 32) + threadIdx.x / 32;
  if (row >= static_cast<int64_t>(forward.q_tokens) * forward.heads) return;
  const int64_t token = row / forward.heads;
  const bf16* out = forward.out + row * forward.dim;
  const bf16* grad_out = params.grad_out + token * params.grad_out_stride + (row - token * forward.heads) * forward.dim;
  float sum = 0.f;
  const int lane = threadIdx.x % 32;
  if (lane * 8 < forward.dim) {
    const auto a = Lanes<bf16, 8>::load(out + lane * 8), b = Lanes<bf16, 8>::load(grad_out + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += widen(a.value[i]) * widen(b.value[i]);
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (lane == 0) {
    workspace.delta[row] = sum;
    workspace.lse2[row] = forward.lse[row] * kLog2E;
  }
}

template <int kDim>
struct QueryGradientStorage {
  static constexpr int kKeySlots = 2, kValueSlots = kDim == 256 ? 1 : 2;
  alignas(1024) uint8_t q[2][kRowsBytes<kDim>];
  uint8_t grad_out[2][kRowsBytes<kDim>];
  uint8_t keys[kKeySlots][kRowsBytes<kDim>];
  uint8_t values[kValueSlots][kRowsBytes<kDim>];
  Words words[kKeySlots][kMostQueries];
  uint64_t keys_full[kKeySlots], keys_empty[kKeySlots], values_full[kValueSlots], values_empty[kValueSlots];
  uint64_t rows_full[2];
};

template <int kDim>
__device__ void produce(const SparseParams& params, const QueryItem& item, QueryGradientStorage<kDim>& shared,
                        int thread) {
  using Storage = QueryGradientStorage<kDim>;
  const int lane = thread % 32;
  const KeyRows k(item.tile.sequence, params.k_stride, item.kv_head, kDim);
  const KeyRows v(item.tile.sequence, params.v_stride, item.kv_head, kDim);
  RingPosition<Storage::kKeySlots> keys;
  RingPosition<Storage::kValueSlots> values;
  UnionReader<kTileKeys> reader(item, lane);
  for (int j = 0; j < item.steps<kTileKeys>(); ++j, keys.advance(), values.advance()) {
    const BlockOfQueries own = reader.take(j);
    const auto k_places = k.template places<kTileKeys>(own.block, lane);
    const auto v_places = v.template places<kTileKeys>(own.block, lane);
    const uint32_t keys_full = shared_address(&shared.keys_full[keys.stage]);
    barrier_wait(shared_address(&shared.keys_empty[keys.stage]), keys.parity ^ 1);
    copy_rows<kDim>(shared_address(shared.keys[keys.stage]), params.k, k_places, thread);
    copy_arrive(keys_full);
    store_words(shared.words[keys.stage], item.tile, own, thread);
    barrier_arrive(keys_full);
    const uint32_t values_full = shared_address(&shared.values_full[values.stage]);
    barrier_wait(shared_address(&shared.values_empty[values.stage]), values.parity ^ 1);
    copy_rows<kDim>(shared_address(shared.values[values.stage]), params.v, v_places, thread);
    copy_arrive(values_full);
    barrier_arrive(values_full);
  }
}

template <int kDim>
__device__ void consume(const SparseBackwardParams& backward, const SparseWorkspace& workspace, const QueryItem& item,
                        QueryGradientStorage<kDim>& shared, int group, int thread) {
  using Storage = QueryGradientStorage<kDim>;
  const SparseParams& params = backward.forward;
  const uint32_t q = shared_address(shared.q[group]), grad_out = shared_address(shared.grad_out[group]);
  const uint32_t rows_full = shared_address(&shared.rows_full[group]);
  const int lane = thread % 32;
  copy_rows<kDim>(q, params.q, item.places(group, params.q_stride, kDim, lane), thread);
  copy_rows<kDim>(grad_out, backward.grad_out, item.places(group, backward.grad_out_stride, kDim, lane), thread);
  copy_arrive(rows_full);
  RowMasks masks(item, group, thread);
  float lse2[2] = {}, delta[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = masks.row[half];
    if (!item.has(row)) continue;
    const int64_t place = item.token(row) * params.heads + item.head(row);
    lse2[half] = workspace.lse2[place];
    delta[half] = workspace.delta[place];
  }
  const float scale2 = params.scale * kLog2E;
  float grad_q[kDim / 2] = {};
  barrier_wait(rows_full, 0);
  fence_async_proxy();

  RingPosition<Storage::kKeySlots> keys;
  RingPosition<Storage::kValueSlots> values;
  const int tiles = item.steps<kTileKeys>();
  const auto wait_for_keys = [&] {
    barrier_wait(shared_address(&shared.keys_full[keys.stage]), keys.parity);
    fence_async_proxy();
  };
  if (tiles > 0) wait_for_keys();
  for (int j = 0; j < tiles; ++j) {
    const int own = keys.stage;
    const uint32_t k = shared_address(shared.keys[own]);
    float scores[32], grad_scores[32];
    mma_fence();
    multiply_rows<kDim>(scores, q, k);
    mma_commit();
    barrier_wait(shared_address(&shared.values_full[values.stage]), values.parity);
    fence_async_proxy();
    mma_fence();
    multiply_rows<kDim>(grad_scores, grad_out, shared_address(shared.values[values.stage]));
    mma_commit();
    masks.read(shared.words[own]);
    mma_wait<1>();
    pin(scores);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float p = fast_exp2(fmaf(scores[i], scale2, -lse2[i / 2 % 2]));
      scores[i] = masks.attends(i) ? p : 0.f;
    }
    pin(scores);
    // The next keys are waited for here: the loop keeps the exponentials before the wait for the product.
    keys.advance();
    if (j + 1 < tiles) wait_for_keys();
    mma_wait<0>();
    pin(grad_scores);
    barrier_arrive(shared_address(&shared.values_empty[values.stage]));
    values.advance();
    // What a value of no weight holds does not matter, so 0 times it is 0.
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      scores[i] = scores[i] == 0.f ? 0.f : scores[i] * (grad_scores[i] - delta[i / 2 % 2]);
    }
    uint32_t weights[4][4];
    pack(weights, scores);
    mma_fence();
    add_weighted_rows<kDim>(grad_q, weights, k);
    mma_commit();
    mma_wait<0>();
    pin(grad_q);
    barrier_arrive(shared_address(&shared.keys_empty[own]));
  }

  const float factor[2] = {params.scale, params.scale};
  store_rows_through<kDim>(shared.q[group], grad_q, factor, thread, [&](int tile_row) {
    const int row = group * kTileRows + tile_row;
    return item.has(row) ? backward.grad_q + (item.token(row) * params.heads + item.head(row)) * kDim : nullptr;
  });
}

template <int kDim>
__global__ __launch_bounds__(kWalkThreads, 1) void query_gradients(const __grid_constant__ SparseBackwardParams params,
                                                                   const __grid_constant__ SparseWorkspace workspace) {
  using Storage = QueryGradientStorage<kDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Storage*>(memory);
  const QueryItem item(params.forward, workspace);
  if (item.tile.queries <= 0) return;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Storage::kKeySlots; ++slot) {
      barrier_init(shared_address(&shared.keys_full[slot]), kProducerArrivals);
      barrier_init(shared_address(&shared.keys_empty[slot]), kConsumerArrivals);
    }
    for (int slot = 0; slot < Storage::kValueSlots; ++slot) {
      barrier_init(shared_address(&shared.values_full[slot]), kProducerArrivals);
      barrier_init(shared_address(&shared.values_empty[slot]), kConsumerArrivals);
    }
    for (auto& barrier : shared.rows_full) barrier_init(shared_address(&barrier), kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x % kWarpgroup;
  if (warpgroup == 2) {
    registers_decrease<kProducerRegisters>();
    produce<kDim>(params.forward, item, shared, thread);
  } else {
    registers_increase<kConsumerRegisters>();
    consume<kDim>(params, workspace, item, shared, warpgroup, thread);
  }
}

template <int kDim>
cudaError_t launch(const SparseBackwardParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  constexpr int kBytes = sizeof(QueryGradientStorage<kDim>);
  static_assert(kBytes <= 227 * 1024, "shared memory of one multiprocessor");
  const int items = query_tile_bound(params.forward) * params.forward.kv_heads;
  return launch_with_shared_memory(query_gradients<kDim>, items, kWalkThreads, kBytes, stream, params, workspace);
}

}  // namespace

cudaError_t launch_row_sums(const SparseBackwardParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  constexpr int kRows = kRowSumThreads / 32;
  const int64_t rows = static_cast<int64_t>(params.forward.q_tokens) * params.forward.heads;
  row_sums<<<static_cast<unsigned>((rows + kRows - 1) / kRows), kRowSumThreads, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

cudaError_t launch_query_gradients(const SparseBackwardParams& params, const SparseWorkspace& workspace,
                                   cudaStream_t stream) {
  return params.forward.dim == 256 ? launch<256>(params, workspace, stream) : launch<128>(params, workspace, stream);
}

}  // namespace sluice::sm90
