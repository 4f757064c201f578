// SPDX-License-Identifier: Apache-2.0
// The walk of a query tile over the union of its blocks (sm90.cuh), which the forward pass and the gradient of q share.
// CTA: two consumer warpgroups with 64 rows each, then a producer warpgroup that gathers keys and values.
#pragma once

#include "sluice/kernels/block_sparse_attention/sm90.cuh"

namespace sluice::sm90 {

constexpr int kWalkThreads = 3 * kWarpgroup;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// Each producer thread arrives once for its copies and once for what it stored.
constexpr int kProducerArrivals = 2 * kWarpgroup, kConsumerArrivals = 2 * kWarpgroup;

// A query tile and a kv head, and where their rows lie.
struct QueryItem {
  QueryTile tile;
  int kv_head;
  RowOfGroup rows;
  const BlockOfQueries* blocks;
  int count;  // of the blocks

  // Later tiles have more blocks, so they begin first. Kv heads of a tile run side by side.
  __device__ QueryItem(const SparseParams& params, const SparseWorkspace& workspace)
      : kv_head(blockIdx.x % params.kv_heads), rows(group_of(params)) {
    const int index = workspace.first_query_tile[params.sequences] - 1 - static_cast<int>(blockIdx.x) / params.kv_heads;
    tile = query_tile(params, workspace, index);
    if (tile.queries <= 0) return;
    blocks = workspace.unions + list_place(params, tile.sequence.q_begin + tile.first);
    count = workspace.union_count[index];
  }
  // Gathered tiles of kKeys keys.
  template <int kKeys>
  __device__ int steps() const {
    return (count + kKeys / kBlock - 1) / (kKeys / kBlock);
  }

  __device__ bool has(int row) const { return rows.query(row) < tile.queries; }
  __device__ int64_t token(int row) const { return tile.sequence.q_begin + tile.first + rows.query(row); }
  __device__ int head(int row) const { return kv_head * rows.group + row - rows.query(row) * rows.group; }
  // The rows of a warpgroup in [Tq, Hq, dim].
  __device__ RowPlaces<kTileRows> places(int group, int64_t stride, int dim, int lane) const {
    RowPlaces<kTileRows> places;
#pragma unroll
    for (int i = 0; i < places.kEach; ++i) {
      const int row = group * kTileRows + 32 * i + lane;
      places.place[i] = has(row) ? row_place(token(row), stride, head(row), dim) : kNoRow;
    }
    return places;
  }
};

// What a producer thread knows of the next tiles of keys: lane i of each warp, block i.
template <int kKeys>
class UnionReader {
 public:
  __device__ UnionReader(const QueryItem& item, int lane) : item_(item), lane_(lane), next_(read(0)) {}
  // Of tile j; they are asked for in order. The one after is on its way meanwhile.
  __device__ BlockOfQueries take(int j) {
    const BlockOfQueries own = next_;
    next_ = read(j + 1);
    return own;
  }

 private:
  __device__ BlockOfQueries read(int j) const {
    const int index = j * (kKeys / kBlock) + lane_;
    return lane_ < kKeys / kBlock && index < item_.count ? item_.blocks[index] : BlockOfQueries{-1, 0};
  }
  const QueryItem& item_;
  int lane_;
  BlockOfQueries next_;
};

// The keys of a sequence and kv head in [Tk, Hkv, dim], in pieces of 16 bytes.
struct KeyRows {
  uint32_t first, stride;
  int count;
  __device__ KeyRows(const SparseSequence& s, int64_t token_stride, int kv_head, int dim)
      : first(row_place(s.k_begin, token_stride, kv_head, dim)),
        stride(static_cast<uint32_t>(token_stride / 8)),
        count(s.k_count) {}
  // Those of the blocks that the lanes of a warp hold; -1 gives rows of zeros.
  template <int kKeys>
  __device__ RowPlaces<kKeys> places(int block, int lane) const {
    RowPlaces<kKeys> places;
#pragma unroll
    for (int i = 0; i < places.kEach; ++i) {
      const int row = 32 * i + lane, key = __shfl_sync(~0u, block, row / kBlock) * kBlock + row % kBlock;
      places.place[i] = key >= 0 && key < count ? first + key * stride : kNoRow;
    }
    return places;
  }
};

// Of a query of the tile, for a tile of keys: bit b where it attends to all keys of block b, or where that is its tail.
struct Words {
  uint32_t whole, tail;
};
__device__ inline void store_words(Words* words, const QueryTile& tile, BlockOfQueries own, int thread) {
  for (int query = thread / 32; query < tile.queries; query += kWarpgroup / 32) {
    const bool attends = own.queries >> query & 1;
    const bool open = own.block == tile.sequence.visible(tile.first + query) / kBlock;
    const uint32_t whole = __ballot_sync(~0u, attends && !open), tail = __ballot_sync(~0u, attends && open);
    if (thread % 32 == 0) words[query] = {whole, tail};
  }
}

// The two rows of a consumer thread, and which keys of a tile they attend to.
class RowMasks {
 public:
  __device__ RowMasks(const QueryItem& item, int group, int thread) {
    const int lane = thread % 32;
    pair_ = lane % 2 * 2;
    shift_ = lane / 2 % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = group * kTileRows + thread / 32 * 16 + lane / 4 + 8 * half;
      query_[half] = item.has(row[half]) ? item.rows.query(row[half]) : -1;
      open_keys_[half] = item.tile.sequence.visible(item.tile.first + query_[half]) % kBlock;
    }
  }
  __device__ void read(const Words* words) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Words own = query_[half] >= 0 ? words[query_[half]] : Words{0, 0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bits_[half][i] = (own.whole | (open_keys_[half] > pair_ + i ? own.tail : 0)) >> shift_;
      }
    }
  }
  // Of element i of an accumulator [64, keys]; i known at compile time.
  __device__ bool attends(int i) const { return bits_[i / 2 % 2][i % 2] >> (i / 4 * 2) & 1; }

  int row[2];

 private:
  int pair_, shift_;  // within 8 columns a thread has two keys of one block: from key pair_ of block shift_ on
  int query_[2], open_keys_[2];
  uint32_t bits_[2][2];  // bit 2j: the thread's columns of group j
};

}  // namespace sluice::sm90
