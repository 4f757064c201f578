// SPDX-License-Identifier: Apache-2.0
// The lists that the kernels of block-sparse attention walk over (sm90.cuh). Bits are set by atomic OR and numbers
// counted by atomic addition of integers; places in a list follow from the order of blocks and queries alone.
#include <algorithm>
#include <cstdio>

#include "sluice/kernels/block_sparse_attention/sm90.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWindow = 8192;  // blocks that are marked at a time

__device__ uint32_t lanes_before(int lane) { return (1u << lane) - 1; }

// Wrong boundaries would send later accesses astray: stops the program with a message.
__device__ void check_sequence(const SparseParams& params, const SparseSequence& s, int n) {
  const bool last = n + 1 == params.sequences;
  const bool queries = (n > 0 || s.q_begin == 0) && s.q_begin >= 0 && s.q_count >= 0 &&
                       s.q_count <= params.q_tokens - s.q_begin && (!last || s.q_begin + s.q_count == params.q_tokens);
  const bool keys =
      s.k_begin >= 0 && s.k_count >= 0 && s.k_count <= params.k_tokens - s.k_begin &&
      (params.seqused_k || ((n > 0 || s.k_begin == 0) && (!last || s.k_begin + s.k_count == params.k_tokens)));
  if (queries && keys) return;
  printf(
      "block_sparse_attention: sequences must rise from 0 to %d queries, and their keys lie in %d rows; sequence %d of "
      "%d has %d queries from %d on and %d keys from %d on\n",
      params.q_tokens, params.k_tokens, n, params.sequences, s.q_count, s.q_begin, s.k_count, s.k_begin);
  __trap();
}

// Two warps: one numbers the query tiles, the other the key tiles.
__global__ void index_tiles(const __grid_constant__ SparseParams params,
                            const __grid_constant__ SparseWorkspace workspace) {
  const int lane = threadIdx.x % 32;
  const bool of_keys = threadIdx.x >= 32;
  const int size = of_keys ? kTileKeys : tile_queries(params);
  int32_t* first_tile = of_keys ? workspace.first_key_tile : workspace.first_query_tile;
  int total = 0;
  for (int begin = 0; begin < params.sequences; begin += 32) {
    const int n = begin + lane;
    int tiles = 0;
    if (n < params.sequences) {
      const SparseSequence s = sparse_sequence(params, n);
      if (!of_keys) check_sequence(params, s, n);
      tiles = ((of_keys ? s.k_count : s.q_count) + size - 1) / size;
    }
    int through = tiles;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, through, distance);
      if (lane >= distance) through += before;
    }
    if (n < params.sequences) first_tile[n] = total + through - tiles;
    total += __shfl_sync(~0u, through, 31);
  }
  if (lane != 0) return;
  first_tile[params.sequences] = total;
  if (of_keys && workspace.attender_count && total > key_tile_bound(params)) {
    printf("block_sparse_attention: two sequences share keys; gradients are computed only where they do not\n");
    __trap();
  }
}

__device__ void check_block(const SparseParams& params, const int32_t* chosen, int c, int complete, int token) {
  const int block = chosen[c], before = c > 0 ? chosen[c - 1] : -1;
  if (block == -1 || (block > before && block < complete && (c == 0 || before >= 0))) return;
  printf(
      "block_sparse_attention: blocks[%d][%d] is %d; the blocks of a query rise, and this one sees %d complete blocks. "
      "After the last one stands -1.\n",
      token, c, block, complete);
  __trap();
}

// A CTA a query tile: a word a block with a bit for each query, then those that are not zero one behind the other.
__global__ __launch_bounds__(kThreads) void list_unions(const __grid_constant__ SparseParams params,
                                                        const __grid_constant__ SparseWorkspace workspace) {
  __shared__ uint32_t attending[kWindow];
  __shared__ int found[kWarps];
  const QueryTile tile = query_tile(params, workspace, blockIdx.x);
  if (tile.queries <= 0) return;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int token = tile.sequence.q_begin + tile.first;
  const int32_t* chosen = params.blocks + static_cast<int64_t>(token) * params.top_k;
  BlockOfQueries* list = workspace.unions + list_place(params, token);
  const int end = (tile.sequence.visible(tile.first + tile.queries - 1) + kBlock - 1) / kBlock;
  int count = 0;
  for (int begin = 0; begin == 0 || begin < end; begin += kWindow) {
    const int warp_words = min(kWindow, (end - begin + kThreads - 1) / kThreads * kThreads) / kWarps;
    for (int i = thread; i < warp_words * kWarps; i += kThreads) attending[i] = 0;
    __syncthreads();
    for (int query = 0; query < tile.queries; ++query) {
      const int visible = tile.sequence.visible(tile.first + query);
      const int32_t* own = chosen + static_cast<int64_t>(query) * params.top_k;
      for (int c = thread; c < params.top_k; c += kThreads) {
        if (begin == 0) check_block(params, own, c, visible / kBlock, token + query);
        const int block = own[c];
        if (block >= begin && block < begin + kWindow) atomicOr(&attending[block - begin], 1u << query);
      }
      const int tail = visible / kBlock;
      if (thread == 0 && visible % kBlock > 0 && tail >= begin && tail < begin + kWindow) {
        atomicOr(&attending[tail - begin], 1u << query);
      }
    }
    __syncthreads();
    const uint32_t* words = attending + warp * warp_words;
    int own = 0;
    for (int i = lane; i < warp_words; i += 32) own += __popc(__ballot_sync(~0u, words[i] != 0));
    if (lane == 0) found[warp] = own;
    __syncthreads();
    int place = count;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) place += found[i];
      count += found[i];
    }
    for (int i = lane; i < warp_words; i += 32) {
      const uint32_t present = __ballot_sync(~0u, words[i] != 0);
      if (words[i] != 0) {
        list[place + __popc(present & lanes_before(lane))] = {begin + warp * warp_words + i, words[i]};
      }
      place += __popc(present);
    }
    __syncthreads();
  }
  if (thread == 0) workspace.union_count[blockIdx.x] = count;
}

// A warp a query: adds it to the count of each key tile of which it attends to a block.
__global__ __launch_bounds__(kThreads) void count_attenders(const __grid_constant__ SparseParams params,
                                                            const __grid_constant__ SparseWorkspace workspace) {
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= params.q_tokens) return;
  const int n = last_at_most(params.cu_seqlens_q, params.sequences, token);
  const SparseSequence s = sparse_sequence(params, n);
  const int32_t* chosen = params.blocks + static_cast<int64_t>(token) * params.top_k;
  int32_t* counts = workspace.attender_count + workspace.first_key_tile[n];
  int last = -1;
  for (int c = lane; c < params.top_k; c += 32) {
    const int block = chosen[c];
    if (block < 0) break;
    if (c == 0 || chosen[c - 1] / kTileBlocks != block / kTileBlocks) atomicAdd(&counts[block / kTileBlocks], 1);
    last = block;
  }
  __syncwarp();
  last = __reduce_max_sync(~0u, last);
  const int visible = s.visible(token - s.q_begin), tail_tile = visible / kTileKeys;
  if (lane == 0 && visible % kBlock > 0 && (last < 0 || last / kTileBlocks != tail_tile)) {
    atomicAdd(&counts[tail_tile], 1);
  }
}

// One CTA: running sums of the counts.
__global__ void place_attenders(const __grid_constant__ SparseParams params,
                                const __grid_constant__ SparseWorkspace workspace) {
  __shared__ int64_t sums[32];
  const int tiles = workspace.first_key_tile[params.sequences], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t total = 0;
  for (int begin = 0; begin < tiles; begin += blockDim.x) {
    const int tile = begin + threadIdx.x;
    const int64_t own = tile < tiles ? workspace.attender_count[tile] : 0;
    int64_t through = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t before = __shfl_up_sync(~0u, through, distance);
      if (lane >= distance) through += before;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    int64_t place = total + through - own;
    for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) {
      if (i < warp) place += sums[i];
      total += sums[i];
    }
    if (tile < tiles) workspace.first_attender[tile] = place;
    __syncthreads();
  }
}

// Queries [first, first + kEach kThreads) of a sequence in steps of kThreads, those of one thread; searched side by
// side, since each search is a chain of loads.
constexpr int kEach = 4;

// Bit b of bits[i]: query i of the thread attends to block first_block + b.
__device__ void attended_blocks(uint32_t (&bits)[kEach], const SparseParams& params, const SparseSequence& s, int query,
                                int first_block) {
  const int32_t* chosen[kEach];
  int places[kEach] = {};  // the first in the list that is not before first_block; -1 is behind all
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int own = min(query + i * kThreads, s.q_count - 1);
    chosen[i] = params.blocks + static_cast<int64_t>(s.q_begin + own) * params.top_k;
  }
  const auto distance = [&](int i, int c) { return static_cast<uint32_t>(chosen[i][c]) - first_block; };
  for (int step = params.top_k > 0 ? 1 << (31 - __clz(params.top_k)) : 0; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int next = places[i] + step;
      if (next <= params.top_k && static_cast<uint32_t>(chosen[i][next - 1]) < static_cast<uint32_t>(first_block)) {
        places[i] = next;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    bits[i] = 0;
    if (query + i * kThreads >= s.q_count) continue;
    for (int c = places[i]; c < params.top_k && chosen[i][c] >= 0 && distance(i, c) < kTileBlocks; ++c) {
      bits[i] |= 1u << distance(i, c);
    }
    const int visible = s.visible(query + i * kThreads), tail = visible / kBlock - first_block;
    if (visible % kBlock > 0 && tail >= 0 && tail < kTileBlocks) bits[i] |= 1u << tail;
  }
}

// A CTA a key tile.
__global__ __launch_bounds__(kThreads) void list_attenders(const __grid_constant__ SparseParams params,
                                                           const __grid_constant__ SparseWorkspace workspace) {
  __shared__ int found[kEach][kWarps];
  const KeyTile tile = key_tile(params, workspace, blockIdx.x);
  if (tile.keys <= 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SparseSequence& s = tile.sequence;
  QueryOfBlocks* list = workspace.attenders + workspace.first_attender[blockIdx.x];
  int count = 0;
  // From the first query on that sees a key of the tile.
  for (int begin = max(tile.first - s.k_count + s.q_count, 0); begin < s.q_count; begin += kEach * kThreads) {
    const int query = begin + threadIdx.x;
    uint32_t bits[kEach], present[kEach];
    attended_blocks(bits, params, s, query, tile.first / kBlock);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      present[i] = __ballot_sync(~0u, bits[i] != 0);
      if (lane == 0) found[i][warp] = __popc(present[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      int place = count;
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) place += found[i][w];
        count += found[i][w];
      }
      if (bits[i] != 0) list[place + __popc(present[i] & lanes_before(lane))] = {query + i * kThreads, bits[i]};
    }
    __syncthreads();
  }
}

int blocks_for(int64_t count, int each) { return static_cast<int>((count + each - 1) / each); }

}  // namespace

cudaError_t launch_tile_index(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  index_tiles<<<1, 64, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

cudaError_t launch_unions(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  list_unions<<<query_tile_bound(params), kThreads, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

cudaError_t launch_attenders(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream) {
  const int tiles = key_tile_bound(params);
  cudaError_t error = cudaMemsetAsync(workspace.attender_count, 0, tiles * sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  count_attenders<<<blocks_for(params.q_tokens, kWarps), kThreads, 0, stream>>>(params, workspace);
  place_attenders<<<1, 1024, 0, stream>>>(params, workspace);
  list_attenders<<<tiles, kThreads, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

}  // namespace sluice::sm90
