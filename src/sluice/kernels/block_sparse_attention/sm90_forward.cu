// SPDX-License-Identifier: Apache-2.0
// The forward pass: softmax over the union of a query tile's blocks, a tile of 64 keys at a time, with a running
// maximum and sum a row (Milakov and Gimelshein 2018; Dao et al. 2022). While the values of one tile of keys are added
// up, the scores of the next are computed and turned to probabilities (Shah et al. 2024, FlashAttention-3).
#include <cmath>

#include "sluice/kernels/block_sparse_attention/sm90_query_walk.cuh"
#include "sluice/kernels/common/shared_memory.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kKeys = 80;  // of a step: reads less shared memory for a product than 64

template <int kDim>
struct ForwardStorage {
  static constexpr int kSlots = kDim == 256 ? 4 : 8;
  alignas(1024) uint8_t q[2][kRowsBytes<kDim>];
  uint8_t slots[kSlots][kRowsBytes<kDim, kKeys>];  // tiles of keys and values in the order of their use
  Words words[kSlots][kMostQueries];               // beside keys
  uint64_t full[kSlots], empty[kSlots], q_full[2];
};

template <int kDim>
__device__ void produce(const SparseParams& params, const QueryItem& item, ForwardStorage<kDim>& shared, int thread) {
  const int lane = thread % 32;
  const KeyRows k(item.tile.sequence, params.k_stride, item.kv_head, kDim);
  const KeyRows v(item.tile.sequence, params.v_stride, item.kv_head, kDim);
  RingPosition<ForwardStorage<kDim>::kSlots> ring;
  const auto load = [&](const bf16* source, const KeyRows& rows, BlockOfQueries own, bool keys) {
    const uint32_t full = shared_address(&shared.full[ring.stage]);
    const auto places = rows.template places<kKeys>(own.block, lane);
    barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    copy_rows<kDim>(shared_address(shared.slots[ring.stage]), source, places, thread);
    copy_arrive(full);
    if (keys) store_words(shared.words[ring.stage], item.tile, own, thread);
    barrier_arrive(full);
    ring.advance();
  };
  UnionReader<kKeys> reader(item, lane);
  const int tiles = item.steps<kKeys>();
  BlockOfQueries own = reader.take(0);
  if (tiles > 0) load(params.k, k, own, true);
  for (int j = 0; j < tiles; ++j) {
    const BlockOfQueries next = reader.take(j + 1);
    if (j + 1 < tiles) load(params.k, k, next, true);
    load(params.v, v, own, false);
    own = next;
  }
}

// Of a thread's two rows.
struct RunningSoftmax {
  float largest[2] = {-INFINITY, -INFINITY};  // score
  float sum[2] = {0.f, 0.f};                  // of the thread's own columns, over 2^(scale2 largest)

  // Scores become probabilities, up to the final sum. Earlier results have to be multiplied by `rescale`.
  __device__ void add(float (&scores)[kKeys / 2], const RowMasks& masks, float scale2, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& score = scores[4 * (i / 2) + 2 * half + i % 2];
        score = masks.attends(4 * (i / 2) + 2 * half + i % 2) ? score : -INFINITY;
        tile_largest = fmaxf(tile_largest, score);
      }
      const float now_largest = fmaxf(largest[half], row_max(tile_largest));
      const float base = now_largest == -INFINITY ? 0.f : now_largest * scale2;
      rescale[half] = fast_exp2(largest[half] * scale2 - base);
      largest[half] = now_largest;
      float tile_sum = 0.f;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& score = scores[4 * (i / 2) + 2 * half + i % 2];
        score = fast_exp2(fmaf(score, scale2, -base));
        tile_sum += score;
      }
      sum[half] = sum[half] * rescale[half] + tile_sum;
    }
  }
};

template <int kDim>
__device__ void consume(const SparseParams& params, const QueryItem& item, ForwardStorage<kDim>& shared, int group,
                        int thread) {
  uint8_t* const own_rows = shared.q[group];
  const uint32_t q = shared_address(own_rows), q_full = shared_address(&shared.q_full[group]);
  copy_rows<kDim>(q, params.q, item.places(group, params.q_stride, kDim, thread % 32), thread);
  copy_arrive(q_full);
  barrier_wait(q_full, 0);
  fence_async_proxy();

  RowMasks masks(item, group, thread);
  RunningSoftmax softmax;
  const float scale2 = params.scale * kLog2E;
  float out[kDim / 2] = {};
  uint32_t probabilities[kKeys / 16][4];
  float rescale[2];
  RingPosition<ForwardStorage<kDim>::kSlots> ring;
  const auto wait_full = [&] {
    barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
    fence_async_proxy();
  };
  const auto release = [&](int stage) { barrier_arrive(shared_address(&shared.empty[stage])); };

  const int tiles = item.steps<kKeys>();
  if (tiles > 0) {
    wait_full();
    float scores[kKeys / 2];
    mma_fence();
    multiply_rows<kDim, kKeys>(scores, q, shared_address(shared.slots[ring.stage]));
    mma_commit();
    masks.read(shared.words[ring.stage]);
    mma_wait<0>();
    pin(scores);
    release(ring.stage);
    ring.advance();
    softmax.add(scores, masks, scale2, rescale);
    pack(probabilities, scores);
    wait_full();
  }
  for (int j = 1; j < tiles; ++j) {
    const int keys = ring.stage;
    float scores[kKeys / 2];
    mma_fence();
    multiply_rows<kDim, kKeys>(scores, q, shared_address(shared.slots[keys]));
    mma_commit();
    ring.advance();
    wait_full();
    const int values = ring.stage;  // of the tile before
    mma_fence();
    add_weighted_rows<kDim, kKeys>(out, probabilities, shared_address(shared.slots[values]));
    mma_commit();
    masks.read(shared.words[keys]);
    mma_wait<1>();
    pin(scores);
    release(keys);
    softmax.add(scores, masks, scale2, rescale);
    pin(scores);
    // What comes next is waited for here: its loop keeps the exponentials before the wait for the products.
    ring.advance();
    wait_full();
    mma_wait<0>();
    pin(out);
    release(values);
    if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) out[i] *= rescale[i / 2 % 2];
    }
    pack(probabilities, scores);
  }
  if (tiles > 0) {
    mma_fence();
    add_weighted_rows<kDim, kKeys>(out, probabilities, shared_address(shared.slots[ring.stage]));
    mma_commit();
    mma_wait<0>();
    pin(out);
  }

  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(softmax.sum[half]);
    factor[half] = sum > 0.f ? 1.f / sum : 0.f;
    const int row = masks.row[half];
    if (thread % 4 == 0 && item.has(row)) {
      params.lse[item.token(row) * params.heads + item.head(row)] =
          sum > 0.f ? softmax.largest[half] * params.scale + logf(sum) : -INFINITY;
    }
  }
  store_rows_through<kDim>(own_rows, out, factor, thread, [&](int tile_row) {
    const int row = group * kTileRows + tile_row;
    return item.has(row) ? params.out + (item.token(row) * params.heads + item.head(row)) * kDim : nullptr;
  });
}

template <int kDim>
__global__ __launch_bounds__(kWalkThreads, 1) void sparse_forward(const __grid_constant__ SparseParams params,
                                                                  const __grid_constant__ SparseWorkspace workspace) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<ForwardStorage<kDim>*>(memory);
  const QueryItem item(params, workspace);
  if (item.tile.queries <= 0) return;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < ForwardStorage<kDim>::kSlots; ++slot) {
      barrier_init(shared_address(&shared.full[slot]), kProducerArrivals);
      barrier_init(shared_address(&shared.empty[slot]), kConsumerArrivals);
    }
    for (auto& barrier : shared.q_full) barrier_init(shared_address(&barrier), kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x % kWarpgroup;
  if (warpgroup == 2) {
    registers_decrease<kProducerRegisters>();
    produce<kDim>(params, item, shared, thread);
  } else {
    registers_increase<kConsumerRegisters>();
    consume<kDim>(params, item, shared, warpgroup, thread);
  }
}

template <int kDim>
cudaError_t launch(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ForwardStorage<kDim>);
  static_assert(kBytes <= 227 * 1024, "shared memory of one multiprocessor");
  return launch_with_shared_memory(sparse_forward<kDim>, query_tile_bound(params) * params.kv_heads, kWalkThreads,
                                   kBytes, stream, params, workspace);
}

}  // namespace

cudaError_t launch_sparse_forward(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  return params.dim == 256 ? launch<256>(params, workspace, stream) : launch<128>(params, workspace, stream);
}

}  // namespace sluice::sm90
