// SPDX-License-Identifier: Apache-2.0
// Pieces of the gradients' kernel (sm90_gradients.cu, which tells the plan and the names): its shared memory, how
// consumers read the ring, and the products that they form.
#pragma once

#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {

constexpr int kSlots = 10;
constexpr uint32_t kSlotBytes = 2 * kTile;
constexpr int kHalves = 2;     // consumer warpgroups 0 and 1: the halves of K
constexpr int kConsumers = 3;  // the last one: pairs of tokens
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kWarps = kWarpgroup / 32;  // of a warpgroup
// Named barriers; 1 and 2 are those of one half each.
constexpr int kPairsBarrier = 3;
constexpr int kHalvesBarrier = 4;

// The order of a value head's slots; those that are done with first come first.
enum Slot { kValueGrad, kOutGrad, kError, kState, kStateGrad = kState + 2, kHeadSlots = kStateGrad + 2 };

struct GradientStorage {
  alignas(1024) uint8_t slots[kSlots][kSlotBytes];
  uint8_t k[2 * kTile];
  uint8_t q[2 * kTile];
  uint8_t staging[2 * kTile];      // gradients of k q^T and k k^T; then one tile a half on its way out
  float gates[kSlots][2][kChunk];  // G and beta, with the slot of kError
  float norms[2][kChunk];          // rk, rq
  // What the consumers add up for dg and dbeta of a value head; in turn, so that the next head may begin. The pairs'
  // warpgroup has its own barrier for them. The halves write to those of a head once they have its state, which has
  // come to a slot that the pairs freed in the head before, and so after the head before that was finished.
  struct {
    float gate[kWarps][kChunk];      // sum_s beta_s (Wp + Wb)_st, one a warp
    float beta[kChunk];              // sum_t (Wp + Wb)_st
    float read[kHalves][kChunk];     // q.H
    float predict[kHalves][kChunk];  // k.J
    float write[kHalves][kChunk];    // k.F
    float states[kHalves][kWarps];   // <S, dS'>, one a warp
  } sums[2];
  float projection[kHalves][2][kChunk];  // q.dq, k.dk for the norm's gradient
  // Full: the producers, and one more that announces bulk copies. Empty: the consumers, of a slot a lane of each warp.
  uint64_t slot_full[kSlots], slot_empty[kSlots], keys_full, keys_empty;
  uint64_t sums_full[2];                 // the halves, for the pairs' warpgroup
  uint64_t staging_full, staging_empty;  // the pairs' warpgroup; the halves
};
static_assert(kState + 2 * kHeadSlots - kSlots >= kHeadSlots, "a state of head i + 2 comes to a slot of head i + 1");
static_assert(sizeof(GradientStorage) <= 227 * 1024, "shared memory of one multiprocessor");

struct GradientItem {
  int chunk, key_head;  // the chunk's place in the segment
  int64_t first;        // token
  int rows;
};
// The items of one launch; a CTA takes every gridDim.x-th.
struct GradientItems {
  int first, last;
};
__device__ inline GradientItem gradient_item(const GatedDeltaParams& params, const Workspace& workspace, int index) {
  const int chunk = index / params.key_heads;
  const int2 rows = workspace.chunk_rows[workspace.segment_begin() + chunk];
  return {chunk, index % params.key_heads, rows.x, rows.y};
}

// The tokens of a chunk lie in tiles in an order of this kernel: warp w of a warpgroup, whose rows are 16w..16w+15 of
// an accumulator, has the tokens of two groups of eight, w and 7 - w. So all warps have as much of a triangle.
__device__ inline int token_of(int row) {
  const int group = row / 8;
  return 8 * (group % 2 ? 7 - group / 2 : group / 2) + row % 8;
}
// copy_token_tile and store_token_tile for tiles in that order, by a warpgroup.
__device__ inline void copy_tokens(uint32_t tile, const bf16* source, int64_t stride, int rows, int thread) {
  const int first = thread / 8, vector = thread % 8, step = first < 8 ? 8 : -8;
  int token = token_of(first);
  source += token * stride + vector * 8;
#pragma unroll
  for (int i = 0; i < kChunk; i += kWarpgroup / 8) {
    copy_16_or_zero(tile + tile_offset(first + i, vector * 8), source, token < rows);
    token += step;
    source += step * stride;
  }
}
__device__ inline void store_tokens(bf16* destination, int64_t stride, int rows, const uint8_t* tile, int thread) {
  const int first = thread / 8, vector = thread % 8, step = first < 8 ? 8 : -8;
  int token = token_of(first);
  destination += token * stride + vector * 8;
#pragma unroll
  for (int i = 0; i < kChunk; i += kWarpgroup / 8) {
    if (token < rows) {
      *reinterpret_cast<uint4*>(destination) =
          *reinterpret_cast<const uint4*>(tile + tile_offset(first + i, vector * 8));
    }
    token += step;
    destination += step * stride;
  }
}

// d [64, 64] = a [64, 128] b [64, 128]^T; both two tiles.
__device__ inline void multiply_rows(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    mma_64x64<Major::kSummedColumns, Major::kSummedColumns>(
        d, operand_step<Major::kSummedColumns>(operand(a + step / 4 * kTile), step % 4),
        operand_step<Major::kSummedColumns>(operand(b + step / 4 * kTile), step % 4), step > 0);
  }
}
// d [64, 64 of K] = a [64, 128 of V] state [128 v, 64 k]: slots of two V halves, of the states the tiles `half`.
__device__ inline void multiply_states(float (&d)[32], uint32_t a, uint32_t state_0, uint32_t state_1, int half) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t state = (step < 4 ? state_0 : state_1) + half * kTile;
    mma_64x64<Major::kSummedColumns, Major::kSummedRows>(
        d, operand_step<Major::kSummedColumns>(operand(a + step / 4 * kTile), step % 4),
        operand_step<Major::kSummedRows>(operand(state), step % 4), step > 0);
  }
}
// d [64, 64] (+)= a b, or a^T b, of tiles [64, 64].
template <Major kA>
__device__ inline void multiply_tiles(float (&d)[32], uint32_t a, uint32_t b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_64x64<kA, Major::kSummedRows>(d, operand_step<kA>(operand(a), step),
                                      operand_step<Major::kSummedRows>(operand(b), step), accumulate || step > 0);
  }
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Dot products of the rows of an accumulator [64 t, 64] with `rows` of a tile; to result[64], by token.
__device__ inline void row_dots(float* result, const float (&d)[32], const uint32_t (&rows)[4][4], int thread) {
  const int warp = thread / 32, lane = thread % 32;
  float sum[2] = {};
#pragma unroll
  for (int p = 0; p < 16; ++p) {
    const float2 x = unpack(rows[p / 4][p % 4]);
    sum[p % 2] += d[2 * p] * x.x + d[2 * p + 1] * x.y;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sum[e] = quad_sum(sum[e]);
    if (lane % 4 == 0) result[token_of(16 * warp + lane / 4 + 8 * e)] = sum[e];
  }
}
// `rows` of the tile itself.
__device__ inline void row_dots(float* result, const float (&d)[32], uint32_t tile, int thread) {
  uint32_t rows[4][4];
  load_rows(rows, tile, thread);
  row_dots(result, d, rows, thread);
}

// Of the trace of an accumulator [64, 64], this warp's part; in lane 0.
__device__ inline float diagonal_sum(const float (&d)[32], int thread) {
  const int warp = thread / 32, lane = thread % 32;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j / 2 == warp) sum += lane & 4 ? d[4 * j + 2 * (j & 1) + 1] : d[4 * j + 2 * (j & 1)];
  }
  // On the diagonal are the lanes with lane % 4 = lane / 8: lane 0 and what these steps lead to from there.
#pragma unroll
  for (const int mask : {4, 9, 18}) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

// Sums over lanes that differ in the bit `kMask`: of twice kCount columns a lane keeps the half that its bit names.
template <int kCount, int kMask>
__device__ inline void fold_columns(float* column, int lane) {
  const bool upper = lane & kMask;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float sent = upper ? column[i] : column[i + kCount];
    const float kept = upper ? column[i + kCount] : column[i];
    column[i] = kept + __shfl_xor_sync(~0u, sent, kMask);
  }
}
// column[2j + e] is this thread's part of column 8j + 2(lane % 4) + e of 64; their sums over the warp to result[64].
__device__ inline void column_sums(float* result, float (&column)[16], int lane) {
  fold_columns<8, 16>(column, lane);
  fold_columns<4, 8>(column, lane);
  fold_columns<2, 4>(column, lane);
  *reinterpret_cast<float2*>(result + 2 * lane) = {column[0], column[1]};
}

// A consumer's place in the ring and how it takes and frees slots of the current value head.
struct SlotReader {
  GradientStorage& shared;
  int lane;
  RingPosition<kSlots> ring;

  // Waits for a slot of the current head; returns its index.
  __device__ int wait(int slot) const {
    const int position = ring.stage + slot;
    const int index = __shfl_sync(~0u, position % kSlots, 0);
    barrier_wait(shared_address(&shared.slot_full[index]), ring.parity ^ (position >= kSlots ? 1 : 0));
    return index;
  }
  // Frees a slot of the current head, which this warp has read, and the tensor cores for it.
  __device__ void release(int slot) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.slot_empty[(ring.stage + slot) % kSlots]));
  }
  __device__ void next_head() {
    for (int slot = 0; slot < kHeadSlots; ++slot) ring.advance();
  }
};

// What one thread of the pairs' warpgroup has of matrices [64 s, 64 t] that count for t >= s alone: of its warp's two
// groups of rows nine blocks [8, 8] on or right of the diagonal, of a block, as of an accumulator's, two columns in one
// row: elements 2 block + {0, 1} of float[kPairs]. Rows and columns are in the order of tiles; here both go by token.
constexpr int kBlocks = 9;
constexpr int kPairs = 2 * kBlocks;
struct PairBlocks {
  int warp, lane;
  int column;  // the first in a group of eight
  int row[2];  // in group w and in group 7 - w

  __device__ explicit PairBlocks(int thread)
      : warp(thread / 32),
        lane(thread % 32),
        column(2 * (lane % 4)),
        row{8 * warp + lane / 4, 8 * (7 - warp) + lane / 4} {}

  // Blocks 3..7 are those of group w in the same columns, block 8 is the last one of group 7 - w. Blocks 0..2 are those
  // of group w where it has them, or else of group 7 - w in columns 6..4.
  __device__ bool in_first_rows(int block) const { return block < 3 ? block >= warp : block < 8; }
  __device__ int columns(int block) const { return block < 3 && block < warp ? 6 - block : min(block, 7); }
  __device__ static bool may_cross_diagonal(int block) { return block < 4 || block == 8; }

  // From an accumulator.
  __device__ void take(float (&x)[kPairs], const float (&d)[32]) const {
    const auto at = [](int columns) { return 4 * (columns < 4 ? 2 * columns : 15 - 2 * columns); };
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const int block = p / 2, e = p % 2;
      x[p] = block == 8 ? d[at(7) + 2 + e] : in_first_rows(block) ? d[at(block) + e] : d[at(6 - block) + 2 + e];
    }
  }

  // Times scale norms_s column_norms_t where t >= s, or t > s for `strict`; zero elsewhere.
  __device__ void scale(float (&x)[kPairs], float scale, const float* norms, const float* column_norms,
                        bool strict) const {
    const float row_factor[2] = {scale * norms[row[0]], scale * norms[row[1]]};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const bool first_rows = in_first_rows(block);
      const int first = 8 * columns(block) + column, diagonal = (first_rows ? row[0] : row[1]) + (strict ? 1 : 0);
      const float factor = first_rows ? row_factor[0] : row_factor[1];
      const float2 norm = *reinterpret_cast<const float2*>(column_norms + first);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool inside = !may_cross_diagonal(block) || first + e >= diagonal;
        x[2 * block + e] = inside ? x[2 * block + e] * (factor * (e ? norm.y : norm.x)) : 0.f;
      }
    }
  }

  // To a tile [64 s, 64 t], with zeros for what the warps do not have.
  __device__ void store(uint32_t tile, const float (&x)[kPairs], int thread) const {
    uint32_t pairs[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // column groups `step` and 7 - `step`
      const auto block = [&](int i) { return pack(x[2 * i], x[2 * i + 1]); };
      pairs[step][0] = in_first_rows(step) ? block(step) : 0;
      pairs[step][1] = 0;
      pairs[step][2] = block(7 - step);
      pairs[step][3] = step == 0 ? block(8) : in_first_rows(step - 1) ? 0 : block(step - 1);
    }
    store_rows(tile, pairs, thread);
  }
};

}  // namespace sluice::sm90
