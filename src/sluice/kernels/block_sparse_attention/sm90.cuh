// SPDX-License-Identifier: Apache-2.0
// What the kernels of block-sparse attention share.
//
// Queries: a query tile is some neighbouring queries of a sequence with the query heads of one kv head: rows (query,
// head) of the products, 128 at most, two warpgroups. Its queries attend to much the same blocks, so it walks over the
// union of their blocks, 16 or 20 at a time, gathered into a tile of 64 or 80 keys; a bit for each (query, block) says
// who attends. Keys: a key tile is 64 neighbouring keys of a sequence. It walks over the list of the queries that
// attend to one of its blocks, gathered likewise into tiles of 48 rows. Both kinds of tiles begin with their sequence,
// so a sequence has the same bits in every pack.
//
// A block is complete for a query when all its keys are seen by it. The open tail of a query is the block after its
// last complete one, of which it sees the first 1, 2 or 3 keys: in the lists it is a block like others.
#pragma once

#include <cstdint>

#include "sluice/kernels/block_sparse_attention/params.h"
#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/common/sm90_copy.cuh"
#include "sluice/kernels/common/sm90_wgmma.cuh"

namespace sluice::sm90 {

using bf16 = __nv_bfloat16;
using SparseParams = BlockSparseAttentionParams;
using SparseBackwardParams = BlockSparseAttentionBackwardParams;

constexpr int kBlock = 4;        // keys of a block
constexpr int kTileBlocks = 16;  // of a key tile
constexpr int kTileKeys = kTileBlocks * kBlock;
constexpr int kWarpgroup = 128;
constexpr int kTileRows = 64;     // (query, head), of one warpgroup
constexpr int kMostQueries = 32;  // of a query tile, a bit each
constexpr uint32_t kTile = tile_bytes(64);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__host__ __device__ inline int group_of(const SparseParams& params) { return params.heads / params.kv_heads; }
// Queries whose rows fill `rows`.
__host__ __device__ inline int queries_in(const SparseParams& params, int rows) {
  const int fitting = rows / group_of(params);
  return fitting < kMostQueries ? fitting : kMostQueries;
}
__host__ __device__ inline int tile_queries(const SparseParams& params) { return queries_in(params, 2 * kTileRows); }

struct BlockOfQueries {
  int32_t block;
  uint32_t queries;  // bit i: query i of the tile attends to it
};
struct QueryOfBlocks {
  int32_t query;    // of the sequence
  uint32_t blocks;  // bit i: it attends to block i of the key tile
};

// Lists of one pass lie where the other's lay: the backward pass is done with query tiles before it makes key lists.
// A query has top_k + 1 blocks at most, the tail among them, so that neither kind is longer than Tq (top_k + 1).
struct SparseWorkspace {
  int32_t* first_query_tile;  // [n + 1], of each sequence; the last is the number of tiles
  int32_t* first_key_tile;    // [n + 1]
  int32_t* union_count;       // [query tiles]: blocks of each
  union {
    BlockOfQueries* unions;    // [Tq (top_k + 1)]: those of a tile from its first query's place on, rising
    QueryOfBlocks* attenders;  // [Tq (top_k + 1)]: those of a key tile from its `first_attender` on, rising
  };
  // Backward alone:
  int32_t* attender_count;  // [key tiles]
  int64_t* first_attender;  // [key tiles]
  float* lse2;              // [Tq, Hq]: lse in powers of two
  float* delta;             // [Tq, Hq]: dO . O
  size_t bytes;
};
SparseWorkspace make_workspace(const SparseParams& params, bool backward);

// Of tiles: the true number is known on the device alone.
__host__ __device__ inline int query_tile_bound(const SparseParams& params) {
  return params.q_tokens / tile_queries(params) + params.sequences;
}
__host__ __device__ inline int key_tile_bound(const SparseParams& params) {
  return params.k_tokens / kTileKeys + params.sequences;
}

cudaError_t launch_tile_index(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream);
cudaError_t launch_unions(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream);
cudaError_t launch_attenders(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream);
cudaError_t launch_sparse_forward(const SparseParams& params, const SparseWorkspace& workspace, cudaStream_t stream);
cudaError_t launch_row_sums(const SparseBackwardParams& params, const SparseWorkspace& workspace, cudaStream_t stream);
cudaError_t launch_query_gradients(const SparseBackwardParams& params, const SparseWorkspace& workspace,
                                   cudaStream_t stream);
cudaError_t launch_key_gradients(const SparseBackwardParams& params, const SparseWorkspace& workspace,
                                 cudaStream_t stream);

// ---- Sequences and tiles

struct SparseSequence {
  int q_begin, q_count, k_begin, k_count;
  // Query i sees the keys [0, visible(i)); may be less than 0, which is none.
  __device__ int visible(int query) const { return max(k_count - q_count + query + 1, 0); }
};
__device__ inline SparseSequence sparse_sequence(const SparseParams& params, int n) {
  const int q_begin = params.cu_seqlens_q[n], k_begin = params.cu_seqlens_k[n];
  return {q_begin, params.cu_seqlens_q[n + 1] - q_begin, k_begin,
          params.seqused_k ? params.seqused_k[n] : params.cu_seqlens_k[n + 1] - k_begin};
}

// The last of `count` entries that is at most `index`, where the first one is.
__device__ inline int last_at_most(const int32_t* rising, int count, int index) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (rising[middle] <= index ? low : high) = middle;
  }
  return low;
}

struct QueryTile {
  SparseSequence sequence;
  int first, queries;  // of the sequence; no queries: there is no such tile
};
__device__ inline QueryTile query_tile(const SparseParams& params, const SparseWorkspace& workspace, int index) {
  if (index < 0 || index >= workspace.first_query_tile[params.sequences]) return {};
  const int n = last_at_most(workspace.first_query_tile, params.sequences, index);
  QueryTile tile;
  tile.sequence = sparse_sequence(params, n);
  tile.first = (index - workspace.first_query_tile[n]) * tile_queries(params);
  tile.queries = min(tile_queries(params), tile.sequence.q_count - tile.first);
  return tile;
}

struct KeyTile {
  SparseSequence sequence;
  int first, keys;  // of the sequence; no keys: there is no such tile
};
__device__ inline KeyTile key_tile(const SparseParams& params, const SparseWorkspace& workspace, int index) {
  if (index >= workspace.first_key_tile[params.sequences]) return {};
  const int n = last_at_most(workspace.first_key_tile, params.sequences, index);
  KeyTile tile;
  tile.sequence = sparse_sequence(params, n);
  tile.first = (index - workspace.first_key_tile[n]) * kTileKeys;
  tile.keys = min(kTileKeys, tile.sequence.k_count - tile.first);
  return tile;
}

// Where the list of a query's blocks, or of a tile that begins with it, has its place.
__host__ __device__ inline int64_t list_place(const SparseParams& params, int token) {
  return static_cast<int64_t>(token) * (params.top_k + 1);
}

// row / group for the rows of a tile, without a division: exact for rows and groups of at most 128.
struct RowOfGroup {
  int group, reciprocal;
  __device__ explicit RowOfGroup(int heads) : group(heads), reciprocal((65535 + heads) / heads) {}
  __device__ int query(int row) const { return row * reciprocal >> 16; }
};

// ---- Tiles in shared memory: [kRows, kDim] as kDim / 64 tiles of 64 columns

template <int kDim, int kRows = 64>
constexpr uint32_t kRowsBytes = kDim / 64 * tile_bytes(kRows);

// Where kRows rows begin, in pieces of 16 bytes from a tensor's start: lane l of a warp knows rows l, l + 32, ...;
// kNoRow: the row is zero.
constexpr uint32_t kNoRow = ~0u;
template <int kRows>
struct RowPlaces {
  static constexpr int kEach = (kRows + 31) / 32;
  uint32_t place[kEach];
};
// The same for one row of [tokens, heads, dim].
__device__ inline uint32_t row_place(int64_t token, int64_t stride, int head, int dim) {
  return static_cast<uint32_t>((token * stride + head * dim) / 8);
}

// A warpgroup copies kRows rows. An instruction of a warp moves one row or two; its addresses take few others, since
// four warps have to keep the tensor cores fed.
template <int kDim, int kRows>
__device__ inline void copy_rows(uint32_t destination, const bf16* source, const RowPlaces<kRows>& rows, int thread) {
  constexpr int kPieces = kDim / 8, kStep = kWarpgroup / kPieces;
  const int piece = thread % kPieces, row = thread / kPieces;
  const auto* own = reinterpret_cast<const uint4*>(source) + piece;
  destination += piece / 8 * tile_bytes(kRows);
  // Rows 8 apart are swizzled alike.
  const uint32_t even = destination + tile_offset(row, piece % 8 * 8);
  const uint32_t odd = destination + tile_offset(row + 4, piece % 8 * 8) - tile_bytes(4);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const uint32_t place = __shfl_sync(~0u, rows.place[i * kStep / 32], i * kStep % 32 + row);
    copy_16_or_zero((i * kStep % 8 == 0 ? even : odd) + tile_bytes(i * kStep), own + place, place != kNoRow);
  }
}

// A warpgroup's [64, kDim] result, factor[i] times, through its rows of shared memory to global memory. Row r goes to
// target(r), or nowhere where that is null.
template <int kDim, class Target>
__device__ inline void store_rows_through(uint8_t* rows, float (&result)[kDim / 2], const float (&factor)[2],
                                          int thread, const Target& target) {
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) result[i] *= factor[i / 2 % 2];
  uint32_t pairs[kDim / 16][4];
  pack(pairs, result);
  store_rows(shared_address(rows), pairs, thread, kTile);
  __syncwarp();  // a warp reads what it wrote: its 16 rows
  constexpr int kPieces = kDim / 8, kStep = 32 / kPieces;
  const int warp = thread / 32, piece = thread % kPieces;
#pragma unroll
  for (int i = 0; i < 16 / kStep; ++i) {
    const int row = 16 * warp + thread % 32 / kPieces + i * kStep;
    if (bf16* to = target(row)) {
      *reinterpret_cast<uint4*>(to + piece * 8) =
          *reinterpret_cast<const uint4*>(rows + piece / 8 * kTile + tile_offset(row, piece % 8 * 8));
    }
  }
}

// ---- Products

// d [64, kRows] = a b^T, of rows a [64, kDim] and b [kRows, kDim] in shared memory.
template <int kDim, int kRows = 64>
__device__ inline void multiply_rows(float (&d)[kRows / 2], uint32_t a, uint32_t b) {
  constexpr auto kMajor = Major::kSummedColumns;
  const uint64_t left = operand(a), right = operand(b);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint64_t own_left = operand_step<kMajor>(left + step / 4 * (kTile / 16), step % 4);
    const uint64_t own_right = operand_step<kMajor>(right + step / 4 * (tile_bytes(kRows) / 16), step % 4);
    if constexpr (kRows == 80) mma_64x80<kMajor, kMajor>(d, own_left, own_right, step > 0);
    else if constexpr (kRows == 48) mma_64x48<kMajor, kMajor>(d, own_left, own_right, step > 0);
    else mma_64x64<kMajor, kMajor>(d, own_left, own_right, step > 0);
  }
}

// sum [64, kDim] += weights [64, kRows] rows, of rows [kRows, kDim] in shared memory.
template <int kDim, int kRows = 64>
__device__ inline void add_weighted_rows(float (&sum)[kDim / 2], const uint32_t (&weights)[kRows / 16][4],
                                         uint32_t rows) {
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    const uint64_t b = operand_step<Major::kSummedRows>(operand(rows, tile_bytes(kRows)), step);
    if constexpr (kDim == 256) mma_64x256<Major::kSummedRows>(sum, weights[step], b, true);
    else mma_64x128<Major::kSummedRows>(sum, weights[step], b, true);
  }
}

// Sum, or maximum, over the four lanes that hold a row of an accumulator.
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

}  // namespace sluice::sm90
