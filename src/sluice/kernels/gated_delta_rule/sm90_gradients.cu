// SPDX-License-Identifier: Apache-2.0
// Gradients of q, k, g and beta, chunk by chunk, once the walks have left S, dS', E and dV of every chunk (sm90.cuh).
// Rows t, s of a chunk; dO the gradient of the output; products over V unless said otherwise. For one value head:
//   R = dO E^T, D = -dV E^T    H = dO S^T, J = dV S^T, F = E dS'^T   [64, K]
//   Wp = (P / beta) . R for t >= s,  Wb = (B / beta) . D for t > s    (elementwise; rows t, columns s)
//   dq~ = scale e^G H + (scale beta_s Gamma R) K~          Gamma_ts = e^(G_t - G_s)
//   dk~ = beta e^(G_C-G) F - e^G J + (scale beta_s Gamma R)^T Q~ + (Y + Y^T) K~,  Y = beta_s Gamma D
//   dbeta_s = sum_t (Wp + Wb)_ts + e^(G_C-G_s) k~_s.F_s
//   dG_t = sum_s beta_s (Wp + Wb)_ts + e^G_t (scale q~_t.H_t - k~_t.J_t) - beta_t dbeta_t
//   and at the chunk's last row  + sum_s beta_s e^(G_C-G_s) k~_s.F_s + e^G_C <S, dS'>;  dg = running sum of dG from the
//   end.
//
// An item is a chunk and a key head with its value heads: the gradients of q and k are summed over the value heads in
// registers. Three consumer warpgroups: two own half of K's columns each of dq and dk and form H, J, F, and half of D's
// columns; the third owns R. The producer warpgroup streams dO, E, dV (16 KiB each), S and dS' (32 KiB each) of each
// value head through a ring of 16 KiB slots; k and q stay for the whole item. CTAs are persistent. Traffic: 112 KiB
// read a chunk and value head.
#include <algorithm>

#include "sluice/kernels/gated_delta_rule/sm90_walk.cuh"

namespace sluice::sm90 {
namespace {

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
  int chunk, key_head;
  int64_t first;  // token
  int rows;
};
__device__ GradientItem gradient_item(const GatedDeltaParams& params, const Workspace& workspace, int index) {
  const int chunk = index / params.key_heads;
  const int2 rows = workspace.chunk_rows[chunk];
  return {chunk, index % params.key_heads, rows.x, rows.y};
}

// The producers' part for k, q and their norms.
__device__ void load_keys(const GatedDeltaParams& params, const Workspace& workspace, GradientStorage& shared,
                          const GradientItem& item, uint32_t parity, int thread) {
  const uint32_t full = shared_address(&shared.keys_full);
  barrier_wait(shared_address(&shared.keys_empty), parity ^ 1);
  if (thread == 0) {
    const float* norms =
        workspace.norms + (static_cast<int64_t>(item.chunk) * params.key_heads + item.key_head) * 2 * kChunk;
    barrier_arrive_expect(full, sizeof(shared.norms));
    bulk_load(shared_address(shared.norms), norms, sizeof(shared.norms), full);
  }
  const bf16* k = params.k + item.first * params.k_stride + item.key_head * kHeadDim;
  const bf16* q = params.q + item.first * params.q_stride + item.key_head * kHeadDim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_token_tile<kWarpgroup>(shared_address(shared.k) + half * kTile, k + half * kHalf, params.k_stride, item.rows,
                                thread);
    copy_token_tile<kWarpgroup>(shared_address(shared.q) + half * kTile, q + half * kHalf, params.q_stride, item.rows,
                                thread);
  }
  copy_arrive(full);
}

__device__ void produce(const GatedDeltaBackwardParams& backward, const Workspace& workspace, GradientStorage& shared,
                        int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int heads = params.value_heads / params.key_heads;
  const int64_t stride = static_cast<int64_t>(params.value_heads) * kHeadDim;
  const int items = workspace.first_chunk[params.sequences] * params.key_heads;
  RingPosition<kSlots> ring;
  RingPosition<1> keys;
  for (int index = blockIdx.x; index < items; index += gridDim.x, keys.advance()) {
    const GradientItem item = gradient_item(params, workspace, index);
    for (int i = 0; i < heads; ++i) {
      const int head = item.key_head * heads + i;
      const int64_t block = static_cast<int64_t>(item.chunk) * params.value_heads + head;
#pragma unroll 1
      for (int slot = 0; slot < kHeadSlots; ++slot, ring.advance()) {
        // k and q wait for the last item's end; what comes before them here does not.
        if (i == 0 && slot == kStateGrad) {
          load_keys(params, workspace, shared, item, keys.parity, thread);
        }
        const uint32_t full = shared_address(&shared.slot_full[ring.stage]);
        const uint32_t destination = shared_address(shared.slots[ring.stage]);
        barrier_wait(shared_address(&shared.slot_empty[ring.stage]), ring.parity ^ 1);
        if (slot < kState) {
          const bf16* source = slot == kOutGrad ? backward.grad_out
                               : slot == kError ? workspace.error
                                                : backward.grad_v;
          source += item.first * stride + head * kHeadDim;
          if (thread == 0) {
            const uint32_t bytes = sizeof(shared.gates[0]);
            barrier_arrive_expect(full, slot == kError ? bytes : 0);
            if (slot == kError) {
              bulk_load(shared_address(shared.gates[ring.stage]),
                        workspace.factors + (block * kFactors + kGate) * kChunk, bytes, full);
            }
          }
          for (int half = 0; half < 2; ++half) {
            copy_token_tile<kWarpgroup>(destination + half * kTile, source + half * kHalf, stride, item.rows, thread);
          }
        } else if (thread == 0) {
          const bf16* source = slot < kStateGrad ? workspace.state : workspace.state_grad;
          const int half = (slot - kState) % 2;
          barrier_arrive_expect(full, kSlotBytes);
          bulk_load(destination, source + (block * 2 + half) * kHalf * kHeadDim, kSlotBytes, full);
        }
        copy_arrive(full);
      }
    }
  }
}

// d [64, 64] = a [64, 128] b [64, 128]^T; both two tiles.
__device__ void multiply_rows(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    mma_64x64<Major::kSummedColumns, Major::kSummedColumns>(
        d, operand_step<Major::kSummedColumns>(operand(a + step / 4 * kTile), step % 4),
        operand_step<Major::kSummedColumns>(operand(b + step / 4 * kTile), step % 4), step > 0);
  }
}
// d [64, 64 of K] (+)= a [64, 64 of V] state [64 v, 64 k]: one V half.
__device__ void multiply_state_half(float (&d)[32], uint32_t a, uint32_t state, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_64x64<Major::kSummedColumns, Major::kSummedRows>(d, operand_step<Major::kSummedColumns>(operand(a), step),
                                                         operand_step<Major::kSummedRows>(operand(state), step),
                                                         accumulate || step > 0);
  }
}
// d [64, 64] += a b, or a^T b, of tiles [64, 64].
template <Major kA>
__device__ void add_product(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_64x64<kA, Major::kSummedRows>(d, operand_step<kA>(operand(a), step),
                                      operand_step<Major::kSummedRows>(operand(b), step), true);
  }
}

__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Dot products of the rows of an accumulator [64, 64] with those of a tile; to result[64].
__device__ void row_dots(float* result, const float (&d)[32], uint32_t tile, int thread) {
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
__device__ void column_sums(float* result, float (&column)[8], int lane) {
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

// dg and dbeta of a value head, from the sums; one warp, two rows a lane.
template <class Sums>
__device__ void finish_gates(const GatedDeltaBackwardParams& backward, const Sums& sums, const GradientStorage& shared,
                             const float (&gate)[2], const float (&beta)[2], float last_gate, const GradientItem& item,
                             int head, int lane) {
  float gate_grad[2], write_total = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const float k_norm = shared.norms[0][row], q_norm = shared.norms[1][row];
    const float write = __expf(last_gate - gate[i]) * k_norm * (sums.write[0][row] + sums.write[1][row]);
    float beta_grad = write;
    for (int warp = 0; warp < 4; ++warp) beta_grad += sums.column[0][warp][row] + sums.column[1][warp][row];
    const float read = backward.forward.scale * q_norm * (sums.read[0][row] + sums.read[1][row]);
    const float predict = k_norm * (sums.predict[0][row] + sums.predict[1][row]);
    gate_grad[i] = sums.row[0][row] + sums.row[1][row] + sums.row[2][row] + __expf(gate[i]) * (read - predict) -
                   beta[i] * beta_grad;
    write_total += beta[i] * write;
    if (row < item.rows) backward.grad_beta[(item.first + row) * backward.forward.value_heads + head] = beta_grad;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) write_total += __shfl_xor_sync(~0u, write_total, mask);
  if (lane == 31) {
    float states = 0.f;
    for (int half = 0; half < kHalves; ++half) {
      for (int warp = 0; warp < 4; ++warp) states += sums.states[half][warp];
    }
    gate_grad[1] += write_total + __expf(last_gate) * states;
  }
  gate_grad[0] += gate_grad[1];
  float sum = gate_grad[0];  // of this lane's rows and all later ones
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_down_sync(~0u, sum, distance);
    if (lane + distance < 32) sum += other;
  }
  float after = __shfl_down_sync(~0u, sum, 1);
  if (lane == 31) after = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row < item.rows)
      backward.grad_g[(item.first + row) * backward.forward.value_heads + head] = after + gate_grad[i];
  }
}

// A consumer's place in the ring and how it takes and frees slots of the current value head.
struct SlotReader {
  GradientStorage& shared;
  int lane;
  RingPosition<kSlots> ring;

  // Waits for a slot of the current head; returns its index.
  __device__ int wait(int slot) const {
    const int position = ring.stage + slot;
    const int index = position % kSlots;
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

// The consumer of R.
__device__ void consume_pairs(const GatedDeltaBackwardParams& backward, const Workspace& workspace,
                              GradientStorage& shared, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int warp = thread / 32, lane = thread % 32;
  const int heads = params.value_heads / params.key_heads;
  const int items = workspace.first_chunk[params.sequences] * params.key_heads;

  SlotReader slots{shared, lane, {}};
  RingPosition<1> keys;
  int turn = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, keys.advance()) {
    const GradientItem item = gradient_item(params, workspace, index);
    barrier_wait(shared_address(&shared.keys_full), keys.parity);
    fence_async_proxy();
    const PairColumns parts[2] = {{shared, true, params.scale, 0, thread}, {shared, true, params.scale, 1, thread}};
    float grad[2][16] = {};
    for (int i = 0; i < heads; ++i, turn ^= 1, slots.next_head()) {
      auto& sums = shared.sums[turn];
      const int error_slot = slots.wait(kError);
      const uint32_t error = shared_address(shared.slots[error_slot]);
      const uint32_t out_grad = shared_address(shared.slots[slots.wait(kOutGrad)]);
      fence_async_proxy();
      const float* gates = shared.gates[error_slot][0];
      const float* betas = shared.gates[error_slot][1];
      float row_sum[2] = {};
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        parts[part].add(grad[part], row_sum, sums.column[0][warp], out_grad, error, gates, betas);
      }
      slots.release_unread(kOutGrad);
      slots.release_unread(kValueGrad);  // this and the states only the others read
      for (int slot = kState; slot < kHeadSlots; ++slot) slots.release_unread(slot);
      parts[0].store_row_sums(sums.row[2], row_sum);
      const float2 gate_pair = *reinterpret_cast<const float2*>(gates + 2 * lane);
      const float2 beta_pair = *reinterpret_cast<const float2*>(betas + 2 * lane);
      const float last_gate = gates[kChunk - 1];
      slots.release(kError);
      if (i + 1 == heads) {
        for (int part = 0; part < 2; ++part) parts[part].store_grad(shared_address(shared.staging), grad[part]);
        fence_async_proxy();
      }
      named_barrier(kConsumerBarrier,
                    kConsumers * kWarpgroup);  // the sums are written, after the last head staging too
      if (warp == i % 4) {
        finish_gates(backward, sums, shared, {gate_pair.x, gate_pair.y}, {beta_pair.x, beta_pair.y}, last_gate, item,
                     item.key_head * heads + i, lane);
      }
    }
    barrier_arrive(shared_address(&shared.keys_empty));
    if (heads == 1) named_barrier(kConsumerBarrier, kConsumers * kWarpgroup);  // the halves are done with staging
  }
}

// A consumer of one half of K's columns: H, J, F and the gradients of q and k.
__device__ void consume_half(const GatedDeltaBackwardParams& backward, const Workspace& workspace,
                             GradientStorage& shared, int half, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int warp = thread / 32, lane = thread % 32;
  const int heads = params.value_heads / params.key_heads;
  const int items = workspace.first_chunk[params.sequences] * params.key_heads;
  const uint32_t k_tile = shared_address(shared.k) + half * kTile, q_tile = shared_address(shared.q) + half * kTile;
  const uint32_t staging = shared_address(shared.staging);
  const int row = 16 * warp + lane / 4;

  SlotReader slots{shared, lane, {}};
  RingPosition<1> keys;
  int turn = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, keys.advance()) {
    const GradientItem item = gradient_item(params, workspace, index);
    barrier_wait(shared_address(&shared.keys_full), keys.parity);
    fence_async_proxy();

    float q_grad[32] = {}, k_grad[32] = {};  // rq dq~ and rk dk~, [64, this half of K]
    const float k_norm[2] = {shared.norms[0][row], shared.norms[0][row + 8]};
    const float q_norm[2] = {shared.norms[1][row], shared.norms[1][row + 8]};
    const PairColumns pairs{shared, false, params.scale, half, thread};
    float pair_grad[16] = {};
    for (int i = 0; i < heads; ++i, turn ^= 1, slots.next_head()) {
      auto& sums = shared.sums[turn];
      const int error_slot = slots.wait(kError), value_grad_slot = slots.wait(kValueGrad);
      fence_async_proxy();
      const float* gates = shared.gates[error_slot][0];
      const float* betas = shared.gates[error_slot][1];
      float row_sum[2] = {};
      pairs.add(pair_grad, row_sum, sums.column[1][warp], shared_address(shared.slots[value_grad_slot]),
                shared_address(shared.slots[error_slot]), gates, betas);
      pairs.store_row_sums(sums.row[half], row_sum);
      const float last_gate = gates[kChunk - 1];
      float decay[2], write_factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float gate = gates[row + 8 * e];
        decay[e] = __expf(gate);
        write_factor[e] = betas[row + 8 * e] * __expf(last_gate - gate) * k_norm[e];
      }
      const int out_grad_slot = slots.wait(kOutGrad);
      const int state_slots[2] = {slots.wait(kState), slots.wait(kState + 1)};
      fence_async_proxy();

      // d [64, 64] = a state: `a` and the state lie in slots of two V halves; the dots of its rows with those of `tile`
      // go to `dots`; then grad += factor d.
      const auto add_dims = [&](float(&grad)[32], int a, int state_0, int state_1, uint32_t tile, float* dots,
                                float first, float second) {
        float product[32];
        mma_fence();
        multiply_state_half(product, shared_address(shared.slots[a]),
                            shared_address(shared.slots[state_0]) + half * kTile, false);
        multiply_state_half(product, shared_address(shared.slots[a]) + kTile,
                            shared_address(shared.slots[state_1]) + half * kTile, true);
        mma_commit();
        mma_wait<0>();
        pin(product);
        row_dots(dots, product, tile, thread);
#pragma unroll
        for (int p = 0; p < 32; ++p) grad[p] += ((p >> 1) & 1 ? second : first) * product[p];
      };
      add_dims(q_grad, out_grad_slot, state_slots[0], state_slots[1], q_tile, sums.read[half],
               params.scale * decay[0] * q_norm[0], params.scale * decay[1] * q_norm[1]);
      slots.release_unread(kOutGrad);
      // J, then F: one body, as the instruction cache is short of room.
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const bool write = part == 1;
        const int states[2] = {slots.wait(write ? kStateGrad : kState), slots.wait((write ? kStateGrad : kState) + 1)};
        fence_async_proxy();
        add_dims(k_grad, write ? error_slot : value_grad_slot, states[0], states[1], k_tile,
                 write ? sums.write[half] : sums.predict[half], write ? write_factor[0] : -decay[0] * k_norm[0],
                 write ? write_factor[1] : -decay[1] * k_norm[1]);
        if (!write) slots.release_unread(kValueGrad);
      }
      {
        // <S, dS'> over one V half: the trace of S^T dS'.
        const uint32_t state = shared_address(shared.slots[slots.wait(kState + half)]);
        const uint32_t state_grad = shared_address(shared.slots[slots.wait(kStateGrad + half)]);
        float product[32];  // [64 v, 64 v]
        mma_fence();
        multiply_rows(product, state, state_grad);
        mma_commit();
        mma_wait<0>();
        pin(product);
        float trace = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j / 2 == warp) trace += lane & 4 ? product[4 * j + 2 * (j & 1) + 1] : product[4 * j + 2 * (j & 1)];
        }
        if (lane % 4 != lane / 8) trace = 0.f;  // not on the diagonal
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) trace += __shfl_xor_sync(~0u, trace, mask);
        if (lane == 0) sums.states[half][warp] = trace;
      }
      slots.release(kError);
      for (int slot = kState; slot < kHeadSlots; ++slot) slots.release_unread(slot);
      if (i + 1 == heads) {
        pairs.store_grad(staging + kTile, pair_grad);
        fence_async_proxy();
      }
      named_barrier(kConsumerBarrier,
                    kConsumers * kWarpgroup);  // the sums are written, after the last head staging too
    }

    const uint32_t query_scores = staging, key_scores = staging + kTile;
    mma_fence();
    add_product<Major::kSummedColumns>(q_grad, query_scores, k_tile);
    add_product<Major::kSummedRows>(k_grad, query_scores, q_tile);
    add_product<Major::kSummedColumns>(k_grad, key_scores, k_tile);
    add_product<Major::kSummedRows>(k_grad, key_scores, k_tile);
    mma_commit();
    mma_wait<0>();
    pin(q_grad);
    pin(k_grad);

    // Through the norms: dq = rq dq~ - q~ (q~ . rq dq~), likewise dk. Then out, by way of this half's staging tile.
    row_dots(shared.projection[half][0], q_grad, q_tile, thread);
    row_dots(shared.projection[half][1], k_grad, k_tile, thread);
    named_barrier(kHalvesBarrier, kHalves * kWarpgroup);
    uint32_t q_rows[4][4], k_rows[4][4];
    load_rows(q_rows, q_tile, thread);
    load_rows(k_rows, k_tile, thread);
    float q_projection[2] = {}, k_projection[2] = {};
    if (params.qk_l2norm) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = row + 8 * e;
        q_projection[e] = q_norm[e] * q_norm[e] * (shared.projection[0][0][at] + shared.projection[1][0][at]);
        k_projection[e] = k_norm[e] * k_norm[e] * (shared.projection[0][1][at] + shared.projection[1][1][at]);
      }
    }
    barrier_arrive(shared_address(&shared.keys_empty));

    const int64_t stride = static_cast<int64_t>(params.key_heads) * kHeadDim;
    const auto write_out = [&](bf16* destination, const float(&grad)[32], const uint32_t(&rows)[4][4],
                               const float(&projection)[2]) {
      uint32_t pairs[4][4];
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        const float2 x = unpack(rows[p / 4][p % 4]);
        pairs[p / 4][p % 4] = pack(grad[2 * p] - projection[p % 2] * x.x, grad[2 * p + 1] - projection[p % 2] * x.y);
      }
      store_rows(staging + half * kTile, pairs, thread);
      named_barrier(1 + half, kWarpgroup);
      store_token_tile<kWarpgroup>(destination + item.first * stride + item.key_head * kHeadDim + half * kHalf, stride,
                                   item.rows, shared.staging + half * kTile, thread);
      named_barrier(1 + half, kWarpgroup);
    };
    write_out(backward.grad_q, q_grad, q_rows, q_projection);
    write_out(backward.grad_k, k_grad, k_rows, k_projection);
    // With more value heads, the sums' barrier of the next item keeps its gradients of the scores out of staging until
    // here.
    if (heads == 1) named_barrier(kConsumerBarrier, kConsumers * kWarpgroup);
  }
}

__global__ __launch_bounds__(kThreads, 1) void gradients(const __grid_constant__ GatedDeltaBackwardParams params,
                                                         const __grid_constant__ Workspace workspace) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<GradientStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(shared_address(&shared.slot_full[slot]), kWarpgroup + 1);
      barrier_init(shared_address(&shared.slot_empty[slot]), kConsumers * kWarpgroup);
    }
    barrier_init(shared_address(&shared.keys_full), kWarpgroup + 1);
    barrier_init(shared_address(&shared.keys_empty), kConsumers * kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  // The CTA starts with 128 registers a thread; these add up to the same.
  if (warpgroup == kConsumers) {
    registers_decrease<40>();
    produce(params, workspace, shared, thread);
  } else if (warpgroup == kHalves) {
    registers_decrease<120>();
    consume_pairs(params, workspace, shared, thread);
  } else {
    registers_increase<176>();
    consume_half(params, workspace, shared, warpgroup, thread);
  }
}

}  // namespace

cudaError_t launch_gradients(const GatedDeltaBackwardParams& params, const Workspace& workspace, cudaStream_t stream) {
  int multiprocessors = 0;
  if (const cudaError_t error = multiprocessor_count(multiprocessors); error != cudaSuccess) return error;
  constexpr int kBytes = sizeof(GradientStorage);
  if (const cudaError_t error = cudaFuncSetAttribute(gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const int grid = std::min(chunk_bound(params.forward) * params.forward.key_heads, multiprocessors);
  gradients<<<grid, kThreads, kBytes, stream>>>(params, workspace);
  return cudaGetLastError();
}

}  // namespace sluice::sm90
