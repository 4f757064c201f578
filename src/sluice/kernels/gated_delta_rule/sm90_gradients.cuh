// SPDX-License-Identifier: Apache-2.0
// Pieces of the gradients' kernel (sm90_gradients.cu, which tells the plan and the names): its shared memory, how
// consumers read the ring, and the products that they form.
#pragma once

#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {

constexpr int kSlots = 10;
constexpr uint32_t kSlotBytes = 2 * kTile;
constexpr int kHalves = 2;     // consumer warpgroups 0 and 1: the halves of K
constexpr int kConsumers = 3;  // the last one: R
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
// Named barriers; 1 and 2 are those of one half each.
constexpr int kConsumerBarrier = 3;
constexpr int kHalvesBarrier = 4;

// The order of a value head's slots; those that are done with first come first.
enum Slot { kValueGrad, kOutGrad, kError, kState, kStateGrad = kState + 2, kHeadSlots = kStateGrad + 2 };

struct GradientStorage {
  alignas(1024) uint8_t slots[kSlots][kSlotBytes];
  uint8_t k[2 * kTile];
  uint8_t q[2 * kTile];
  uint8_t staging[2 * kTile];      // gradients of q k^T and k k^T; then one tile a half on its way out
  float gates[kSlots][2][kChunk];  // G and beta, with the slot of kError
  float norms[2][kChunk];          // rk, rq
  // What the consumers add up for dg and dbeta of a value head; in turn, so that the next head may begin.
  struct {
    float row[kConsumers][kChunk];   // sum_s beta_s Wb_ts, half of the columns each; of Wp
    float column[2][4][kChunk];      // sum_t Wp_ts; of Wb; one a warp
    float read[kHalves][kChunk];     // q.H
    float predict[kHalves][kChunk];  // k.J
    float write[kHalves][kChunk];    // k.F
    float states[kHalves][4];        // <S, dS'>, one a warp
  } sums[2];
  float projection[kHalves][2][kChunk];  // q.dq, k.dk for the norm's gradient
  // Full: the producers, and one more that announces bulk copies. Empty: the consumers.
  uint64_t slot_full[kSlots], slot_empty[kSlots], keys_full, keys_empty;
};
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

// d [64, 64] = a [64, 128] b [64, 128]^T; both two tiles.
__device__ inline void multiply_rows(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    mma_64x64<Major::kSummedColumns, Major::kSummedColumns>(
        d, operand_step<Major::kSummedColumns>(operand(a + step / 4 * kTile), step % 4),
        operand_step<Major::kSummedColumns>(operand(b + step / 4 * kTile), step % 4), step > 0);
  }
}
// d [64, 64 of K] (+)= a [64, 64 of V] state [64 v, 64 k]: one V half.
__device__ inline void multiply_state_half(float (&d)[32], uint32_t a, uint32_t state, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_64x64<Major::kSummedColumns, Major::kSummedRows>(d, operand_step<Major::kSummedColumns>(operand(a), step),
                                                         operand_step<Major::kSummedRows>(operand(state), step),
                                                         accumulate || step > 0);
  }
}
// d [64, 64] += a b, or a^T b, of tiles [64, 64].
template <Major kA>
__device__ inline void add_product(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_64x64<kA, Major::kSummedRows>(d, operand_step<kA>(operand(a), step),
                                      operand_step<Major::kSummedRows>(operand(b), step), true);
  }
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Dot products of the rows of an accumulator [64, 64] with those of a tile; to result[64].
__device__ inline void row_dots(float* result, const float (&d)[32], uint32_t tile, int thread) {
  const int warp = thread / 32, lane = thread % 32, matrix = lane / 8;
  float sum[2] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t rows[4];
    load_matrices(rows, tile + tile_offset(16 * warp + 8 * (matrix & 1) + lane % 8, 16 * step + 8 * (matrix >> 1)));
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 x = unpack(rows[p]);
      sum[p % 2] += d[8 * step + 2 * p] * x.x + d[8 * step + 2 * p + 1] * x.y;
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sum[e] = quad_sum(sum[e]);
    if (lane % 4 == 0) result[16 * warp + lane / 4 + 8 * e] = sum[e];
  }
}

// Sums over the 8 lanes that share a column group: column[2j + e] is this thread's part of column 8j + 2(lane % 4) + e
// of 32. To result[32].
__device__ inline void column_sums(float* result, float (&column)[8], int lane) {
#pragma unroll
  for (int count = 4, mask = 16; count >= 1; count /= 2, mask /= 2) {
    const bool upper = lane & mask;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float sent = upper ? column[i] : column[i + count];
      const float kept = upper ? column[i + count] : column[i];
      column[i] = kept + __shfl_xor_sync(~0u, sent, mask);
    }
  }
  const int j = ((lane >> 4) & 1) * 2 + ((lane >> 3) & 1), e = (lane >> 2) & 1;
  result[8 * j + 2 * (lane % 4) + e] = column[0];
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
  // Frees a slot of the current head. Every lane says for itself that it has read it.
  __device__ void release(int slot) const {
    barrier_arrive(shared_address(&shared.slot_empty[(ring.stage + slot) % kSlots]));
  }
  // Frees a slot that this warp did not read, but for the tensor cores, which are done.
  __device__ void release_unread(int slot) const {
    if (lane == 0) barrier_arrive(shared_address(&shared.slot_empty[(ring.stage + slot) % kSlots]), 32);
  }
  __device__ void next_head() {
    for (int slot = 0; slot < kHeadSlots; ++slot) ring.advance();
  }
};

// 32 columns of R or D and what follows from them, for one value head. Thread's part of a [64 t, 32 s] matrix: rows
// `row` and `row` + 8, columns 8j + `column` + {0, 1}.
struct PairColumns {
  GradientStorage& shared;
  bool query;  // R and q k^T; otherwise -D and k k^T
  int part;    // which 32 columns
  int warp, lane, row, column;
  float row_factor[2];

  __device__ PairColumns(GradientStorage& storage, bool is_query, float scale, int which, int thread)
      : shared(storage),
        query(is_query),
        part(which),
        warp(thread / 32),
        lane(thread % 32),
        row(16 * warp + lane / 4),
        column(2 * (lane % 4)) {
    for (int e = 0; e < 2; ++e)
      row_factor[e] = query ? scale * shared.norms[1][row + 8 * e] : -shared.norms[0][row + 8 * e];
  }

  // `left` is dO or dV, `error` E, with its gates and betas. Adds to `grad` the gradient of the raw q k^T or k k^T, but
  // for the norms' factors; to row_sum, but for row_factor, the sums over s; the sums over t go to `column_result`,
  // [64] of this warp.
  __device__ void add(float (&grad)[16], float (&row_sum)[2], float* column_result, uint32_t left, uint32_t error,
                      const float* gates, const float* betas) const {
    constexpr uint32_t kPartBytes = kChunk / 2 * kTileRowBytes;
    const uint32_t keys = shared_address(shared.k) + part * kPartBytes;
    const uint32_t rows = query ? shared_address(shared.q) : shared_address(shared.k);
    error += part * kPartBytes;
    float product[16], score[16];  // R or D; q k^T or k k^T
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const auto at = [&](uint32_t tiles) {
        return operand_step<Major::kSummedColumns>(operand(tiles + step / 4 * kTile), step % 4);
      };
      mma_64x32<Major::kSummedColumns, Major::kSummedColumns>(product, at(left), at(error), step > 0);
      mma_64x32<Major::kSummedColumns, Major::kSummedColumns>(score, at(rows), at(keys), step > 0);
    }
    mma_commit();
    const float row_gate[2] = {gates[row], gates[row + 8]};
    mma_wait<0>();
    pin(product);
    pin(score);
    const int last_column = query ? row : row - 1;  // of the first row
    float column_sum[8] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (2 * part + j / 2 > warp) continue;  // above the diagonal
      const int first = 32 * part + 8 * j + column;
      const float2 gate = *reinterpret_cast<const float2*>(gates + first);
      const float2 beta = *reinterpret_cast<const float2*>(betas + first);
      const float2 norm = *reinterpret_cast<const float2*>(shared.norms[0] + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int p = 4 * j + e;
        const bool inside = first + (e & 1) <= last_column + 8 * (e >> 1);
        const float column_beta = e & 1 ? beta.y : beta.x;
        const float weighted = __expf(inside ? row_gate[e >> 1] - (e & 1 ? gate.y : gate.x) : -INFINITY) * product[p];
        const float share = weighted * score[p];
        grad[p] += weighted * column_beta;
        row_sum[e >> 1] += share * (column_beta * (e & 1 ? norm.y : norm.x));
        column_sum[2 * j + (e & 1)] += share * row_factor[e >> 1];
      }
    }
#pragma unroll
    for (int m = 0; m < 8; ++m) column_sum[m] *= shared.norms[0][32 * part + 8 * (m / 2) + column + (m & 1)];
    column_sums(column_result + 32 * part, column_sum, lane);
  }

  __device__ void store_row_sums(float* result, const float (&row_sum)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = quad_sum(row_sum[e]) * row_factor[e];
      if (lane % 4 == 0) result[row + 8 * e] = sum;
    }
  }

  // The finished gradient, with the norms' factors, to its columns of a tile.
  __device__ void store_grad(uint32_t tile, const float (&grad)[16]) const {
    const int matrix = lane / 8;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 norm =
            *reinterpret_cast<const float2*>(shared.norms[0] + 32 * part + 16 * step + 8 * (i / 2) + column);
        const int p = 8 * step + 2 * i;
        pairs[i] = pack(grad[p] * row_factor[i & 1] * norm.x, grad[p + 1] * row_factor[i & 1] * norm.y);
      }
      store_matrices(
          tile + tile_offset(16 * warp + 8 * (matrix & 1) + lane % 8, 32 * part + 16 * step + 8 * (matrix >> 1)),
          pairs);
    }
  }
};

}  // namespace sluice::sm90
