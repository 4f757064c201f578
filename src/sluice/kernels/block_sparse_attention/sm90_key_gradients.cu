// SPDX-License-Identifier: Apache-2.0
// The gradients of k and v, over key tiles. Of 64 keys and the rows (query, head) of the queries that attend to one of
// them, 48 rows at a time, in rising order of queries:
//   P^T = exp(scale K Q^T - lse)    dV += P^T dO    dS^T = P^T (V dO^T - D)    dK += scale dS^T Q
// Everything is transposed, so that P^T and dS^T are left operands in the registers where they arise. One consumer
// warpgroup owns dV and makes P^T, which it hands to the other through shared memory; that one owns dK. A producer
// warpgroup gathers rows of q and dO. A key tile and kv head is one CTA's, so sums have one order.
#include "sluice/kernels/block_sparse_attention/sm90.cuh"
#include "sluice/kernels/common/shared_memory.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kThreads = 3 * kWarpgroup;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

constexpr int kRows = 48;  // of a step: 4 queries of 12 heads, and three steps fit

template <int kDim>
struct KeyGradientStorage {
  static constexpr int kStages = kDim == 256 ? 3 : 4;
  alignas(1024) uint8_t k[kRowsBytes<kDim>];
  uint8_t v[kRowsBytes<kDim>];
  uint8_t q[kStages][kRowsBytes<kDim, kRows>];
  uint8_t grad_out[kStages][kRowsBytes<kDim, kRows>];
  uint4 probabilities[kRows / 16][kWarpgroup];  // bfloat16, of thread t of the one group for thread t of the other
  uint32_t words[kStages][2][kRows];            // of a row: bit i where it attends to key i; 32 keys each
  float lse2[kStages][kRows], delta[kStages][kRows];
  uint64_t keys_full, full[kStages], empty[kStages], probabilities_full, probabilities_empty;
};

// A key tile, a kv head and the list of its queries.
struct KeyItem {
  KeyTile tile;
  int kv_head, queries_at_once;
  RowOfGroup rows;
  const QueryOfBlocks* list;
  int count;

  __device__ KeyItem(const SparseParams& params, const SparseWorkspace& workspace)
      : kv_head(blockIdx.x % params.kv_heads), queries_at_once(queries_in(params, kRows)), rows(group_of(params)) {
    const int index = static_cast<int>(blockIdx.x) / params.kv_heads;
    tile = key_tile(params, workspace, index);
    if (tile.keys <= 0) return;
    list = workspace.attenders + workspace.first_attender[index];
    count = workspace.attender_count[index];
  }
  __device__ int steps() const { return (count + queries_at_once - 1) / queries_at_once; }
  // Row `row` of [Tk, Hkv, d] at a token stride.
  template <typename T>
  __device__ T* key_row(T* x, int64_t stride, int row, int dim) const {
    return row < tile.keys ? x + (tile.sequence.k_begin + tile.first + row) * stride + kv_head * dim : nullptr;
  }
};

// 8 bits to 8 x 4.
__device__ uint32_t four_times_each(uint32_t bits) {
  bits = (bits | bits << 12) & 0x000F000F;
  bits = (bits | bits << 6) & 0x03030303;
  bits = (bits | bits << 3) & 0x11111111;
  return bits * 15;
}

// Which of the 64 keys a query attends to.
__device__ uint2 attended_keys(const KeyTile& tile, QueryOfBlocks own) {
  const int visible = tile.sequence.visible(own.query), tail = visible / kBlock - tile.first / kBlock;
  uint2 words = {four_times_each(own.blocks & 0xFF), four_times_each(own.blocks >> 8)};
  if (tail >= 0 && tail < kTileBlocks) {  // of its open tail those keys that it sees
    const uint32_t hidden = (0xFu << visible % kBlock & 0xFu) << tail % 8 * kBlock;
    (tail < 8 ? words.x : words.y) &= ~hidden;
  }
  return words;
}

// 4 bytes; zero when `valid` is false.
__device__ void copy_4_or_zero(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(valid ? 4 : 0)
               : "memory");
}

template <int kDim>
__device__ void produce(const SparseBackwardParams& backward, const SparseWorkspace& workspace, const KeyItem& item,
                        KeyGradientStorage<kDim>& shared, int thread) {
  const SparseParams& params = backward.forward;
  const int lane = thread % 32, q_begin = item.tile.sequence.q_begin;
  const uint32_t keys_full = shared_address(&shared.keys_full);
  const auto load_keys = [&](uint8_t* destination, const bf16* source, int64_t stride) {
    RowPlaces<kTileKeys> places;
#pragma unroll
    for (int i = 0; i < places.kEach; ++i) {
      const int key = 32 * i + lane, token = item.tile.sequence.k_begin + item.tile.first + key;
      places.place[i] = key < item.tile.keys ? row_place(token, stride, item.kv_head, kDim) : kNoRow;
    }
    copy_rows<kDim>(shared_address(destination), source, places, thread);
  };
  load_keys(shared.k, params.k, params.k_stride);
  load_keys(shared.v, params.v, params.v_stride);
  copy_arrive(keys_full);

  const auto read = [&](int step) {
    const int index = step * item.queries_at_once + lane;
    return lane < item.queries_at_once && index < item.count ? item.list[index] : QueryOfBlocks{-1, 0};
  };
  QueryOfBlocks next = read(0);
  RingPosition<KeyGradientStorage<kDim>::kStages> ring;
  for (int step = 0; step < item.steps(); ++step, ring.advance()) {
    const QueryOfBlocks own = next;  // lane i of each warp: query i of those at once
    next = read(step + 1);
    // The query of a row, or -1.
    const auto query_of = [&](int row) {
      const int place = item.rows.query(row), query = __shfl_sync(~0u, own.query, place);
      return place < item.queries_at_once ? query : -1;
    };
    RowPlaces<kRows> q_places, grad_places;
#pragma unroll
    for (int i = 0; i < q_places.kEach; ++i) {
      const int row = 32 * i + lane, query = query_of(row);
      const int head = item.kv_head * item.rows.group + row - item.rows.query(row) * item.rows.group;
      q_places.place[i] = query >= 0 ? row_place(q_begin + query, params.q_stride, head, kDim) : kNoRow;
      grad_places.place[i] = query >= 0 ? row_place(q_begin + query, backward.grad_out_stride, head, kDim) : kNoRow;
    }
    const uint32_t full = shared_address(&shared.full[ring.stage]);
    barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    copy_rows<kDim>(shared_address(shared.q[ring.stage]), params.q, q_places, thread);
    copy_rows<kDim>(shared_address(shared.grad_out[ring.stage]), backward.grad_out, grad_places, thread);
    if (thread < 64) {  // two whole warps, for the first kRows threads
      const int query = query_of(thread), place = item.rows.query(thread);
      const uint2 keys = attended_keys(item.tile, own);
      const uint32_t low = __shfl_sync(~0u, keys.x, place), high = __shfl_sync(~0u, keys.y, place);
      if (thread < kRows) {
        const int64_t row = static_cast<int64_t>(q_begin + query) * params.heads + item.kv_head * item.rows.group +
                            thread - place * item.rows.group;
        copy_4_or_zero(shared_address(&shared.lse2[ring.stage][thread]), workspace.lse2 + row, query >= 0);
        copy_4_or_zero(shared_address(&shared.delta[ring.stage][thread]), workspace.delta + row, query >= 0);
        shared.words[ring.stage][0][thread] = query >= 0 ? low : 0;
        shared.words[ring.stage][1][thread] = query >= 0 ? high : 0;
      }
    }
    copy_arrive(full);
    barrier_arrive(full);
  }
}

// What stands for the two columns of a thread in group i of an accumulator [64, 64].
__device__ float2 pair_of(const float* columns, int i, int lane) {
  return *reinterpret_cast<const float2*>(columns + 8 * i + lane % 4 * 2);
}
__device__ uint2 pair_of(const uint32_t* columns, int i, int lane) {
  return *reinterpret_cast<const uint2*>(columns + 8 * i + lane % 4 * 2);
}

template <int kDim>
__device__ void consume_values(const SparseBackwardParams& backward, const KeyItem& item,
                               KeyGradientStorage<kDim>& shared, int thread) {
  const SparseParams& params = backward.forward;
  const int warp = thread / 32, lane = thread % 32;
  const int shift = warp % 2 * 16 + lane / 4;  // the thread's keys in a word: this one and the one 8 on
  const float scale2 = params.scale * kLog2E;
  const uint32_t k = shared_address(shared.k);
  float grad_v[kDim / 2] = {};
  RingPosition<KeyGradientStorage<kDim>::kStages> ring;
  RingPosition<1> turn;
  barrier_wait(shared_address(&shared.keys_full), 0);
  fence_async_proxy();
  for (int step = 0; step < item.steps(); ++step, ring.advance(), turn.advance()) {
    barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
    fence_async_proxy();
    float p[kRows / 2];
    mma_fence();
    multiply_rows<kDim, kRows>(p, k, shared_address(shared.q[ring.stage]));
    mma_commit();
    mma_wait<0>();
    pin(p);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const uint2 words = pair_of(shared.words[ring.stage][warp / 2], i, lane);
      const float2 lse2 = pair_of(shared.lse2[ring.stage], i, lane);
      const uint32_t attends[2] = {words.x >> shift, words.y >> shift};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = fast_exp2(fmaf(p[4 * i + e], scale2, e % 2 == 0 ? -lse2.x : -lse2.y));
        p[4 * i + e] = attends[e % 2] >> (e / 2 * 8) & 1 ? weight : 0.f;
      }
    }
    uint32_t weights[kRows / 16][4];
    pack(weights, p);
    barrier_wait(shared_address(&shared.probabilities_empty), turn.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      shared.probabilities[i][thread] = {weights[i][0], weights[i][1], weights[i][2], weights[i][3]};
    }
    barrier_arrive(shared_address(&shared.probabilities_full));
    mma_fence();
    add_weighted_rows<kDim, kRows>(grad_v, weights, shared_address(shared.grad_out[ring.stage]));
    mma_commit();
    mma_wait<0>();
    pin(grad_v);
    barrier_arrive(shared_address(&shared.empty[ring.stage]));
  }
  const float factor[2] = {1.f, 1.f};
  store_rows_through<kDim>(shared.k, grad_v, factor, thread, [&](int row) {
    return item.key_row(backward.grad_v, static_cast<int64_t>(params.kv_heads) * kDim, row, kDim);
  });
}

template <int kDim>
__device__ void consume_keys(const SparseBackwardParams& backward, const KeyItem& item,
                             KeyGradientStorage<kDim>& shared, int thread) {
  const SparseParams& params = backward.forward;
  const int lane = thread % 32;
  const uint32_t v = shared_address(shared.v);
  float grad_k[kDim / 2] = {};
  RingPosition<KeyGradientStorage<kDim>::kStages> ring;
  RingPosition<1> turn;
  barrier_wait(shared_address(&shared.keys_full), 0);
  fence_async_proxy();
  for (int step = 0; step < item.steps(); ++step, ring.advance(), turn.advance()) {
    barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
    fence_async_proxy();
    float grad_scores[kRows / 2];
    mma_fence();
    multiply_rows<kDim, kRows>(grad_scores, v, shared_address(shared.grad_out[ring.stage]));
    mma_commit();
    mma_wait<0>();
    pin(grad_scores);
    barrier_wait(shared_address(&shared.probabilities_full), turn.parity);
    // What a value of no weight holds does not matter, so 0 times it is 0.
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const uint4 four = shared.probabilities[i][thread];
      const float2 p[4] = {unpack(four.x), unpack(four.y), unpack(four.z), unpack(four.w)};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 delta = pair_of(shared.delta[ring.stage], 2 * i + pair / 2, lane);
        float* grad = grad_scores + 8 * i + 2 * pair;
        grad[0] = p[pair].x == 0.f ? 0.f : p[pair].x * (grad[0] - delta.x);
        grad[1] = p[pair].y == 0.f ? 0.f : p[pair].y * (grad[1] - delta.y);
      }
    }
    barrier_arrive(shared_address(&shared.probabilities_empty));
    uint32_t weights[kRows / 16][4];
    pack(weights, grad_scores);
    mma_fence();
    add_weighted_rows<kDim, kRows>(grad_k, weights, shared_address(shared.q[ring.stage]));
    mma_commit();
    mma_wait<0>();
    pin(grad_k);
    barrier_arrive(shared_address(&shared.empty[ring.stage]));
  }
  const float factor[2] = {params.scale, params.scale};
  store_rows_through<kDim>(shared.v, grad_k, factor, thread, [&](int row) {
    return item.key_row(backward.grad_k, static_cast<int64_t>(params.kv_heads) * kDim, row, kDim);
  });
}

template <int kDim>
__global__ __launch_bounds__(kThreads, 1) void key_gradients(const __grid_constant__ SparseBackwardParams params,
                                                             const __grid_constant__ SparseWorkspace workspace) {
  using Storage = KeyGradientStorage<kDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Storage*>(memory);
  const KeyItem item(params.forward, workspace);
  if (item.tile.keys <= 0) return;
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.keys_full), kWarpgroup);
    barrier_init(shared_address(&shared.probabilities_full), kWarpgroup);
    barrier_init(shared_address(&shared.probabilities_empty), kWarpgroup);
    for (int stage = 0; stage < Storage::kStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), 2 * kWarpgroup);   // copies, and what is stored
      barrier_init(shared_address(&shared.empty[stage]), 2 * kWarpgroup);  // both consumers
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x % kWarpgroup;
  if (warpgroup == 2) {
    registers_decrease<kProducerRegisters>();
    produce<kDim>(params, workspace, item, shared, thread);
  } else {
    registers_increase<kConsumerRegisters>();
    if (warpgroup == 0) consume_values<kDim>(params, item, shared, thread);
    else consume_keys<kDim>(params, item, shared, thread);
  }
}

template <int kDim>
cudaError_t launch(const SparseBackwardParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  constexpr int kBytes = sizeof(KeyGradientStorage<kDim>);
  static_assert(kBytes <= 227 * 1024, "shared memory of one multiprocessor");
  const int items = key_tile_bound(params.forward) * params.forward.kv_heads;
  return launch_with_shared_memory(key_gradients<kDim>, items, kThreads, kBytes, stream, params, workspace);
}

}  // namespace

cudaError_t launch_key_gradients(const SparseBackwardParams& params, const SparseWorkspace& workspace,
                                 cudaStream_t stream) {
  return params.forward.dim == 256 ? launch<256>(params, workspace, stream) : launch<128>(params, workspace, stream);
}

}  // namespace sluice::sm90
