// SPDX-License-Identifier: Apache-2.0
// A CTA chooses for some neighbouring queries of a sequence whose heads fill the 16 rows of a matrix product. It
// computes all their scores into shared memory, finds each query's top_k-th score bit by bit, and writes the blocks
// above it, and as many equal ones as fit, in rising order. A score comes from one chain of products whatever else is
// in the pack, so its bits depend on query and block key alone.
#include <algorithm>
#include <cstdio>

#include "sluice/kernels/block_top_k/params.h"
#include "sluice/kernels/common/shared_memory.cuh"

namespace sluice {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 16;  // (query, head)
constexpr int kGroup = 8;  // blocks of a product
constexpr int kAhead = 4;  // groups of a warp whose keys are loaded together
constexpr uint32_t kAllLanes = ~0u;

struct Tile {
  int q_begin, q_count, block_begin, key_count;  // of the sequence
  int first, queries;                            // no queries: there is no such tile
};

// Tiles of sequence n begin at cu_seqlens_q[n] / tile_queries + n, which leaves room for those before.
__device__ Tile find_tile(const BlockTopKParams& params, int index) {
  const int size = kRows / params.heads;
  int low = 0, high = params.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (params.cu_seqlens_q[middle] / size + middle <= index ? low : high) = middle;
  }
  Tile tile;
  tile.q_begin = params.cu_seqlens_q[low];
  tile.q_count = params.cu_seqlens_q[low + 1] - tile.q_begin;
  tile.block_begin = params.cu_blocks[low];
  tile.key_count = params.seqused_k[low];
  tile.first = (index - tile.q_begin / size - low) * size;
  tile.queries = min(size, tile.q_count - tile.first);
  const bool inside = tile.q_begin >= 0 && tile.q_count >= 0 && tile.q_count <= params.q_tokens - tile.q_begin &&
                      tile.block_begin >= 0 && tile.key_count >= 0 &&
                      tile.key_count / params.block_size <= params.block_rows - tile.block_begin;
  if (!inside && threadIdx.x == 0) {
    printf(
        "block_top_k: sequence %d has %d queries from %d on, of %d, and the blocks of %d keys from row %d on, of %d\n",
        low, tile.q_count, tile.q_begin, params.q_tokens, tile.key_count, tile.block_begin, params.block_rows);
    __trap();
  }
  return tile;
}

// Complete blocks that query i of the tile sees.
__device__ int blocks_of(const BlockTopKParams& params, const Tile& tile, int i) {
  return max(tile.key_count - tile.q_count + tile.first + i + 1, 0) / params.block_size;
}

__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of a sum over dims every order is as good, so a lane takes 8 neighbours of each 32 dims: two products' worth.
template <int kDim>
struct Rows {
  uint32_t a[kDim / 16][4];

  __device__ Rows(const BlockTopKParams& params, const Tile& tile, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half, query = row / params.heads;
      const bool own = query < tile.queries;
      const int64_t token = tile.q_begin + tile.first + (own ? query : 0);
      const auto* source = params.q + token * params.q_stride + (row - query * params.heads) * kDim + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        const uint4 x = own ? *reinterpret_cast<const uint4*>(source + 32 * i) : uint4{0, 0, 0, 0};
        a[2 * i][half] = x.x, a[2 * i][2 + half] = x.y;
        a[2 * i + 1][half] = x.z, a[2 * i + 1][2 + half] = x.w;
      }
    }
  }
};

// Scores of blocks [0, width) for queries [begin, end) of the tile: the bits of floats that are not negative, which
// rise with them. width is a multiple of kGroup; scores past a query's blocks are not looked at.
template <int kDim>
__device__ void compute_scores(const BlockTopKParams& params, const Tile& tile, const Rows<kDim>& rows, int begin,
                               int end, int width, uint32_t* scores) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = width / kGroup, last = blocks_of(params, tile, tile.queries - 1) - 1;
  const auto* keys = params.block_keys + static_cast<int64_t>(tile.block_begin) * kDim + lane % 4 * 8;
  for (int first = warp * kAhead; first < groups; first += kWarps * kAhead) {
    uint4 key[kAhead][kDim / 32];
#pragma unroll
    for (int g = 0; g < kAhead; ++g) {
      const auto* source = keys + static_cast<int64_t>(min((first + g) * kGroup + lane / 4, last)) * kDim;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) key[g][i] = *reinterpret_cast<const uint4*>(source + 32 * i);
    }
#pragma unroll
    for (int g = 0; g < kAhead; ++g) {
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        multiply(sum, rows.a[2 * i], key[g][i].x, key[g][i].y);
        multiply(sum, rows.a[2 * i + 1], key[g][i].z, key[g][i].w);
      }
#pragma unroll
      for (float& x : sum) {
        x = fmaxf(x, 0.f);  // 0 where it is no number
        for (int heads = 1; heads < params.heads; heads *= 2) x += __shfl_xor_sync(kAllLanes, x, 4 * heads);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half, query = row / params.heads;
        if (row % params.heads != 0 || query < begin || query >= end || first + g >= groups) continue;
        *reinterpret_cast<uint2*>(scores + (query - begin) * width + (first + g) * kGroup + lane % 4 * 2) = {
            __float_as_uint(sum[2 * half] * params.scale), __float_as_uint(sum[2 * half + 1] * params.scale)};
      }
    }
  }
}

// The largest number that at least top_k of the scores reach, or one that just top_k of them reach; top_k < count.
__device__ uint32_t threshold_of(const uint32_t* scores, int count, int top_k) {
  __shared__ int reaching[2][kWarps];
  uint32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t candidate = threshold | 1u << bit;
    int own = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) own += scores[i] >= candidate;
    own = __reduce_add_sync(kAllLanes, own);
    if (threadIdx.x % 32 == 0) reaching[bit % 2][threadIdx.x / 32] = own;
    __syncthreads();
    int all = 0;
    for (const int x : reaching[bit % 2]) all += x;
    if (all >= top_k) threshold = candidate;
    if (all == top_k) break;
  }
  return threshold;
}

// Writes the blocks of the top_k highest scores in rising order; of those equal to the threshold the first ones.
__device__ void write_chosen(const uint32_t* scores, int count, uint32_t threshold, int top_k, int32_t* chosen) {
  __shared__ int above[kWarps], equal[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int width = (count + kThreads - 1) / kThreads * 32;  // of a warp
  const auto visit = [&](const auto& visitor) {
    for (int i = warp * width + lane; i < (warp + 1) * width; i += 32) {
      const bool is_above = i < count && scores[i] > threshold, is_equal = i < count && scores[i] == threshold;
      visitor(i, is_above, is_equal, __ballot_sync(kAllLanes, is_above), __ballot_sync(kAllLanes, is_equal));
    }
  };
  int own_above = 0, own_equal = 0;
  visit([&](int, bool, bool, uint32_t all_above, uint32_t all_equal) {
    own_above += __popc(all_above);
    own_equal += __popc(all_equal);
  });
  __syncthreads();  // the last query's numbers are read
  if (lane == 0) above[warp] = own_above, equal[warp] = own_equal;
  __syncthreads();
  int above_before = 0, equal_before = 0, equal_taken = top_k;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) above_before += above[w], equal_before += equal[w];
    equal_taken -= above[w];
  }
  const uint32_t before = (1u << lane) - 1;
  visit([&](int i, bool is_above, bool is_equal, uint32_t all_above, uint32_t all_equal) {
    const int rank = equal_before + __popc(all_equal & before);
    if (is_above || (is_equal && rank < equal_taken)) {
      chosen[above_before + __popc(all_above & before) + min(rank, equal_taken)] = i;
    }
    above_before += __popc(all_above);
    equal_before += __popc(all_equal);
  });
}

// `capacity` scores fit in shared memory: of all queries at once, or of fewer, several times.
template <int kDim>
__global__ __launch_bounds__(kThreads) void choose_blocks(const __grid_constant__ BlockTopKParams params,
                                                          int capacity) {
  extern __shared__ __align__(16) uint32_t scores[];
  const Tile tile = find_tile(params, gridDim.x - 1 - blockIdx.x);  // those that see most first
  if (tile.queries <= 0) return;
  const int width = (blocks_of(params, tile, tile.queries - 1) + kGroup - 1) / kGroup * kGroup;
  if (width > capacity) {
    if (threadIdx.x == 0) printf("block_top_k: %d blocks of a sequence; at most %d are possible\n", width, capacity);
    __trap();
  }
  const Rows<kDim> rows(params, tile, threadIdx.x % 32);
  const int together = width > 0 ? min(capacity / width, tile.queries) : tile.queries;
  for (int begin = 0; begin < tile.queries; begin += together) {
    const int end = min(begin + together, tile.queries);
    if (blocks_of(params, tile, end - 1) > params.top_k) {
      __syncthreads();  // the last scores are read
      compute_scores<kDim>(params, tile, rows, begin, end, width, scores);
      __syncthreads();
    }
    for (int query = begin; query < end; ++query) {
      const int count = blocks_of(params, tile, query);
      int32_t* chosen = params.chosen + static_cast<int64_t>(tile.q_begin + tile.first + query) * params.top_k;
      if (count <= params.top_k) {
        for (int i = threadIdx.x; i < params.top_k; i += kThreads) chosen[i] = i < count ? i : -1;
      } else {
        const uint32_t* own = scores + (query - begin) * width;
        write_chosen(own, count, threshold_of(own, count, params.top_k), params.top_k, chosen);
      }
    }
  }
}

template <int kDim>
cudaError_t launch(const BlockTopKParams& params, cudaStream_t stream) {
  const int queries = kRows / params.heads;
  const int width = (std::min(params.block_rows, kBlockTopKMostBlocks) + kGroup - 1) / kGroup * kGroup;
  const int capacity = static_cast<int>(std::min<int64_t>(int64_t{queries} * width, kBlockTopKMostBlocks));
  const int bytes = capacity * static_cast<int>(sizeof(uint32_t));
  return launch_with_shared_memory(choose_blocks<kDim>, params.q_tokens / queries + params.sequences, kThreads, bytes,
                                   stream, params, capacity);
}

}  // namespace

cudaError_t launch_block_top_k(const BlockTopKParams& params, cudaStream_t stream) {
  switch (params.dim) {
    case 32:
      return launch<32>(params, stream);
    case 64:
      return launch<64>(params, stream);
    default:
      return launch<128>(params, stream);
  }
}

}  // namespace sluice
