// SPDX-License-Identifier: Apache-2.0
// What can be computed for every chunk at once: the matrices N and P and the factors of sm90.cuh. A CTA of one
// warpgroup owns a chunk and a key head, a warp 16 rows of all matrices: K K^T and Q K^T are computed once and stay in
// registers, for each of the key head's value heads. Traffic: q and k read once, 16 KiB + 1.25 KiB written a chunk and
// value head.
//
// N = (I + B)^-1 goes by blocks of 16 by 16. Warp i, for one head after the other:
//   1. P_ii, B_ii and N_ii = (I + B_ii)^-1;
//   2. P_ij and B_ij N_jj for j < i;
//   3. N_ij = - sum over j < m <= i of N_im (B_mj N_jj), from the diagonal to the left: no row waits for another's N.
// The right operands of products come from other warps, through shared memory; the left ones are the warp's own.
#include "sluice/kernels/gated_delta_rule/sm90.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kBlock = 16;  // a warp's rows
constexpr int kBlocks = kChunk / kBlock;
constexpr int kGateBatch = 4;  // value heads whose gates are loaded at once, one a warp

// Of one value head. e^(G_t - G_s) of a block below the diagonal is the product of two factors, of its rows and of its
// columns, that meet at the gate of its first row.
struct Gates {
  float gate[kChunk], beta[kChunk];
  float row_decay[kChunk];                  // from the first row of the row's block
  float column_decay[kBlocks - 1][kChunk];  // to the first row of the second, third and fourth block, times beta
};

// A block of 16 by 16 as the right operand of multiply_blocks: see right_place.
using RightBlock = float4[2][32];

// The quarters of a diagonal block but the upper right one: first of -B, upper left and lower right transposed; then of
// N. Rows of 12 and quarters of 104 floats spread accesses over the banks.
struct Diagonal {
  struct Quarter {
    float at[kBlock / 2][kBlock / 2 + 4], unused[8];
  };
  Quarter on[2], below;
};

struct PrepareStorage {
  union {
    struct {
      alignas(1024) uint8_t k[2 * kTile];
      uint8_t q[2 * kTile];
    } input;
    struct {
      alignas(1024) uint8_t scores[kTile], inverse[kTile];  // P and N on their way out
      Diagonal diagonal[kBlocks];
      RightBlock diagonal_inverse[kBlocks - 1];       // N_ii
      RightBlock below[kBlocks * (kBlocks - 1) / 2];  // -B_ij N_jj
    } matrix;
  };
  Gates gates[kGateBatch];
  float k_norm[kChunk], q_norm[kChunk];
  uint64_t loaded;
};

__device__ uint32_t to_tf32(float x) {
  uint32_t result;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}
__device__ float round_to_tf32(float x) { return __uint_as_float(to_tf32(x)); }

// d [16, 8] += a [16, 8] b [8, 8], tf32, one warp.
__device__ void mma_tf32(float* d, const uint32_t* a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// d [16, 8] += a [16, 16] b [16, 8], bf16, one warp.
__device__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A block of 16 by 16 in registers lies as accumulators do: [4h + 2e + i] is row lane / 4 + 8e, column 8h + 2(lane % 4)
// + i. As a left operand its elements stay in their lanes: column 2c stands for the instruction's column c, 2c + 1 for
// c + 4. The rows of the right operand are taken in that order too.
using LeftBlock = uint32_t[8];
__device__ void as_left(LeftBlock& left, const float (&block)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    left[4 * half] = to_tf32(block[4 * half]);
    left[4 * half + 1] = to_tf32(block[4 * half + 2]);
    left[4 * half + 2] = to_tf32(block[4 * half + 1]);
    left[4 * half + 3] = to_tf32(block[4 * half + 3]);
  }
}
// Where a lane's elements of the upper or the lower 8 rows of a right operand lie: of row 2(lane % 4) columns lane / 4
// and lane / 4 + 8, then of the next row. The order of the lanes spreads over the banks what store_right writes.
__device__ int right_place(int lane) { return lane ^ lane / 8 ^ lane / 16 * 4; }

// d [16, 16] += a b, tf32, one warp.
__device__ void multiply_blocks(float (&d)[8], const LeftBlock& a, const RightBlock& b, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 right = b[half][right_place(lane)];
    mma_tf32(&d[0], &a[4 * half], right.x, right.z);
    mma_tf32(&d[4], &a[4 * half], right.y, right.w);
  }
}

// A block from registers, as a right operand.
__device__ void store_right(RightBlock& right, const float (&block)[8], int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto* const place = reinterpret_cast<float2*>(&right[e][right_place(4 * (column + i) + row / 2)]);
      place[row % 2] = {round_to_tf32(block[2 * e + i]), round_to_tf32(block[4 + 2 * e + i])};
    }
  }
}

__device__ float2& pair_of(Diagonal::Quarter& quarter, int lane) {
  return *reinterpret_cast<float2*>(&quarter.at[lane / 4][2 * (lane % 4)]);
}

// N_ii = (I + B_ii)^-1. Its quarters on the diagonal by forward substitution in fp32, a column a lane, which stays
// exact where equal keys make large cancelling powers of B; the one below them, -N_22 B_21 N_11, by tensor cores.
__device__ void invert_diagonal(PrepareStorage& shared, int warp, int lane) {
  constexpr int kRows = kBlock / 2;
  Diagonal& diagonal = shared.matrix.diagonal[warp];
  auto& quarter = diagonal.on[lane / kRows % 2].at;  // the upper half of the lanes does what the lower does
  const int own = lane % kRows;
  float column[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) column[i] = i == own ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < kRows - 1; ++j) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < kRows; i += 4) {
      const float4 b = *reinterpret_cast<const float4*>(&quarter[j][i]);
      if (i > j) column[i] += b.x * column[j];
      if (i + 1 > j) column[i + 1] += b.y * column[j];
      if (i + 2 > j) column[i + 2] += b.z * column[j];
      column[i + 3] += b.w * column[j];
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRows; ++i) quarter[i][own] = column[i];
  __syncwarp();
  // Operands in two parts each, for nearly the accuracy of fp32; the left one's are upper and lower rows.
  const auto product = [&](float2 left, const Diagonal::Quarter& right) {
    const int row = 2 * (lane % 4), column = lane / 4;
    const float b[2] = {right.at[row][column], right.at[row + 1][column]};
    const float left_high[2] = {round_to_tf32(left.x), round_to_tf32(left.y)};
    const float high[2] = {round_to_tf32(b[0]), round_to_tf32(b[1])};
    const uint32_t a[4] = {__float_as_uint(left_high[0]), to_tf32(left.x - left_high[0]), __float_as_uint(left_high[1]),
                           to_tf32(left.y - left_high[1])};
    float d[4] = {};
    mma_tf32(d, a, round_to_tf32(b[0] - high[0]), round_to_tf32(b[1] - high[1]));
    mma_tf32(d, a, high[0], high[1]);
    return float2{d[0] + d[2], d[1] + d[3]};
  };
  const float2 upper = pair_of(diagonal.on[0], lane), lower = pair_of(diagonal.on[1], lane);
  const float2 below = product(product(lower, diagonal.below), diagonal.on[0]);
  __syncwarp();
  pair_of(diagonal.below, lane) = below;
  if (warp < kBlocks - 1) {
    store_right(shared.matrix.diagonal_inverse[warp], {upper.x, upper.y, below.x, below.y, 0.f, 0.f, lower.x, lower.y},
                lane);
  }
}

// Of a head, two tokens a lane.
struct GateInput {
  float gate[2], beta[2];
};
__device__ GateInput load_gates(const GatedDeltaParams& params, int2 rows, int head, int lane) {
  GateInput input;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const int64_t index = static_cast<int64_t>(rows.x + row) * params.value_heads + head;
    input.gate[i] = row < rows.y ? params.g[index] : 0.f;
    input.beta[i] = row < rows.y ? params.beta[index] : 0.f;
  }
  return input;
}

// Running sum of g over the chunk, beta, and the decays; all neutral beyond the last token. One warp.
__device__ void store_gates(Gates& gates, const GateInput& input, int lane) {
  float gate[2] = {input.gate[0], input.gate[0] + input.gate[1]};
  float sum = gate[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0.f;
#pragma unroll
  for (float& g : gate) g += before;
  const auto store = [&](float(&to)[kChunk], float first, float second) {
    *reinterpret_cast<float2*>(&to[2 * lane]) = {first, second};
  };
  store(gates.gate, gate[0], gate[1]);
  store(gates.beta, input.beta[0], input.beta[1]);
  constexpr int kLanes = kBlock / 2;  // that hold a block
  const float own = __shfl_sync(~0u, gate[0], lane / kLanes * kLanes);
  store(gates.row_decay, decay_of(gate[0] - own), decay_of(gate[1] - own));
#pragma unroll
  for (int block = 1; block < kBlocks; ++block) {
    const float first = __shfl_sync(~0u, gate[0], block * kLanes);
    const bool above = lane < block * kLanes;
    store(gates.column_decay[block - 1], input.beta[0] * decay_of(above ? first - gate[0] : -INFINITY),
          input.beta[1] * decay_of(above ? first - gate[1] : -INFINITY));
  }
}

__device__ void store_factors(float* factors, const Gates& gates, const PrepareStorage& shared, float scale, int row) {
  const float gate = gates.gate[row], last = gates.gate[kChunk - 1], beta = gates.beta[row];
  const float decayed = decay_of(gate);
  factors[kPredict * kChunk + row] = decayed * shared.k_norm[row];
  factors[kWrite * kChunk + row] = beta * decay_of(last - gate) * shared.k_norm[row];
  factors[kRead * kChunk + row] = scale * decayed * shared.q_norm[row];
  factors[kGate * kChunk + row] = gate;
  factors[kBeta * kChunk + row] = beta;
}

// A warp's 16 rows of a tile.
__device__ void store_block(uint32_t tile, int block, const uint32_t (&data)[4], int warp, int lane) {
  const int matrix = lane / 8;
  store_matrices(tile + tile_offset(kBlock * warp + 8 * (matrix & 1) + lane % 8, kBlock * block + 8 * (matrix >> 1)),
                 data);
}
__device__ void copy_rows_out(bf16* destination, const uint8_t* tile, int warp, int lane) {
  constexpr int kVectors = kBlock * kTileRowBytes / 16;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kVectors; i += 32) {
    reinterpret_cast<uint4*>(destination)[kVectors * warp + i + lane] =
        reinterpret_cast<const uint4*>(tile)[kVectors * warp + i + lane];
  }
  __syncwarp();
}

// A warp's rows of -K K^T or scale Q K^T, normalised: the blocks left of the diagonal, as far as they exist, and on it.
struct Rows {
  float below[kBlocks - 1][8], diagonal[8];
};

// Of a head, the diagonal blocks: P_ii, and -B_ii for the substitution.
__device__ void diagonal_block(PrepareStorage& shared, const Gates& gates, const Rows& kk, const Rows& qk, int warp,
                               int lane) {
  const int first = kBlock * warp, row = lane / 4, column = 2 * (lane % 4);
  Diagonal& diagonal = shared.matrix.diagonal[warp];
  const float row_gate[2] = {gates.gate[first + row], gates.gate[first + row + 8]};
  uint32_t scores[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 gate = *reinterpret_cast<const float2*>(&gates.gate[first + 8 * half + column]);
    const float2 beta = *reinterpret_cast<const float2*>(&gates.beta[first + 8 * half + column]);
#pragma unroll
    for (int e = half; e < 2; ++e) {  // above the diagonal for e < half
      const int at = 4 * half + 2 * e;
      // Masked before the exponential: above the diagonal the exponent may be large.
      const float factor[2] = {decay_of(e > half || row >= column ? row_gate[e] - gate.x : -INFINITY) * beta.x,
                               decay_of(e > half || row > column ? row_gate[e] - gate.y : -INFINITY) * beta.y};
      scores[2 * half + e] = pack(qk.diagonal[at] * factor[0], qk.diagonal[at + 1] * factor[1]);
      const float2 coupling = {kk.diagonal[at] * factor[0], kk.diagonal[at + 1] * factor[1]};
      if (e > half) {
        pair_of(diagonal.below, lane) = coupling;
      } else {
        diagonal.on[half].at[column][row] = coupling.x;
        diagonal.on[half].at[column + 1][row] = coupling.y;
      }
    }
  }
  store_block(shared_address(shared.matrix.scores), warp, scores, warp, lane);
  __syncwarp();
}

// The blocks below the diagonal: P_ij, -B_ij N_jj.
__device__ void blocks_below(PrepareStorage& shared, const Gates& gates, const Rows& kk, const Rows& qk, int warp,
                             int lane) {
  const int row = kBlock * warp + lane / 4, column = 2 * (lane % 4);
  const float row_decay[2] = {gates.row_decay[row], gates.row_decay[row + 8]};
#pragma unroll
  for (int j = 0; j < kBlocks - 1; ++j) {
    if (j >= warp) break;
    float factor[8], coupling[8], product[8] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 decay =
          *reinterpret_cast<const float2*>(&gates.column_decay[warp - 1][kBlock * j + 8 * half + column]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        factor[4 * half + 2 * e] = row_decay[e] * decay.x;
        factor[4 * half + 2 * e + 1] = row_decay[e] * decay.y;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) coupling[i] = kk.below[j][i] * factor[i];
    LeftBlock left;
    as_left(left, coupling);
    multiply_blocks(product, left, shared.matrix.diagonal_inverse[j], lane);
    uint32_t scores[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scores[i] = pack(qk.below[j][2 * i] * factor[2 * i], qk.below[j][2 * i + 1] * factor[2 * i + 1]);
    store_block(shared_address(shared.matrix.scores), j, scores, warp, lane);
    store_right(shared.matrix.below[warp * (warp - 1) / 2 + j], product, lane);
  }
}

// The row of N, from the diagonal to the left: N_ij = sum over m > j of N_im (-B_mj N_jj).
__device__ void inverse_row(PrepareStorage& shared, int warp, int lane) {
  Diagonal& diagonal = shared.matrix.diagonal[warp];
  const float2 upper = pair_of(diagonal.on[0], lane), lower = pair_of(diagonal.on[1], lane);
  const float2 below = pair_of(diagonal.below, lane);
  float inverse[8] = {upper.x, upper.y, below.x, below.y, 0.f, 0.f, lower.x, lower.y};
  LeftBlock left[kBlocks - 1];  // N_ij at the distance i - j
#pragma unroll
  for (int distance = 0; distance < kBlocks; ++distance) {
    if (distance > warp) break;
    const int j = warp - distance;
    if (distance > 0) {
#pragma unroll
      for (float& x : inverse) x = 0.f;
    }
#pragma unroll
    for (int nearer = 0; nearer < distance; ++nearer) {
      const int m = warp - nearer;
      multiply_blocks(inverse, left[nearer], shared.matrix.below[m * (m - 1) / 2 + j], lane);
    }
    if (distance < kBlocks - 1) as_left(left[distance], inverse);
    store_block(shared_address(shared.matrix.inverse), j,
                {pack(inverse[0], inverse[1]), pack(inverse[2], inverse[3]), pack(inverse[4], inverse[5]),
                 pack(inverse[6], inverse[7])},
                warp, lane);
  }
}

// The thread's lane, read anew: places that follow from it are computed where they are needed, as there are no
// registers to keep them in.
__device__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  __builtin_assume(0 <= lane && lane < 32);
  return lane;
}

__global__ __launch_bounds__(kWarpgroup, 4) void prepare(GatedDeltaParams params, Workspace workspace,
                                                         int first_key_head, int key_heads) {
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<PrepareStorage*>(raw);
  // The heads of a chunk side by side, since a row of q, k and the gates has them together. `chunk` is the place in the
  // segment.
  const int chunk = blockIdx.x / key_heads, key_head = first_key_head + blockIdx.x % key_heads;
  // The kernel after this one waits for this one alone; so it must outlast the walk beside which it runs.
  const bool outlasts = blockIdx.x == 0;
  if (workspace.segment_begin() + chunk >= workspace.segment_end(params.sequences)) {
    if (outlasts) wait_for_earlier_kernels();
    return;
  }
  const int thread = threadIdx.x, warp = thread / 32;
  int lane = thread % 32;
  const int2 rows = workspace.chunk_rows[workspace.segment_begin() + chunk];

  const uint32_t loaded = shared_address(&shared.loaded);
  if (thread == 0) {
    barrier_init(loaded, kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  const int heads = params.value_heads / params.key_heads, first_head = key_head * heads;
  GateInput gates{};  // on their way while the copies of q and k are made
  if (warp < heads) gates = load_gates(params, rows, first_head + warp, lane);
  const uint32_t k_tiles = shared_address(shared.input.k), q_tiles = shared_address(shared.input.q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t column = key_head * kHeadDim + half * kHalf;
    copy_token_tile<kWarpgroup>(k_tiles + half * kTile, params.k + rows.x * params.k_stride + column, params.k_stride,
                                rows.y, thread);
    copy_token_tile<kWarpgroup>(q_tiles + half * kTile, params.q + rows.x * params.q_stride + column, params.q_stride,
                                rows.y, thread);
  }
  copy_arrive(loaded);
  if (warp < heads) store_gates(shared.gates[warp], gates, lane);
  barrier_wait(loaded, 0);
  fence_async_proxy();

  // K K^T and Q K^T, [64 t, 64 s].
  float keys[32], queries[32];
  uint32_t left[8][4];
  const auto multiply_keys = [&](float(&product)[32]) {
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint64_t key = operand_step<Major::kSummedColumns>(operand(k_tiles + step / 4 * kTile), step % 4);
      mma_64x64<Major::kSummedColumns>(product, left[step], key, step > 0);
    }
    mma_commit();
  };
  load_rows(left, k_tiles, thread, kTile);
  multiply_keys(keys);
  mma_wait<0>();
  pin(keys);
  load_rows(left, q_tiles, thread, kTile);
  multiply_keys(queries);
  float qq[2][4] = {};  // the diagonal blocks of 8 of Q Q^T: rows as a left operand are columns as a right one
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    mma_bf16(qq[0], left[step], left[step][0], left[step][2]);
    mma_bf16(qq[1], left[step], left[step][1], left[step][3]);
  }
  mma_wait<0>();
  pin(queries);

  // The warp's diagonal block goes to a place of its own.
  Rows kk, qk;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (j < kBlocks - 1) kk.below[j][i] = keys[8 * j + i], qk.below[j][i] = queries[8 * j + i];
      if (j == 0 || j == warp) kk.diagonal[i] = keys[8 * j + i], qk.diagonal[i] = queries[8 * j + i];
    }
  }
  const int row = kBlock * warp + lane / 4, column = 2 * (lane % 4);
  if (lane % 4 == lane / 8) {  // the lane with the squares of rows `row` and `row + 8`
    const bool odd = lane / 4 % 2;
    const auto norm = [&](float even_square, float odd_square) {
      return params.qk_l2norm ? rsqrtf((odd ? odd_square : even_square) + kNormEpsilon) : 1.f;
    };
    shared.k_norm[row] = norm(kk.diagonal[0], kk.diagonal[1]);
    shared.k_norm[row + 8] = norm(kk.diagonal[6], kk.diagonal[7]);
    shared.q_norm[row] = norm(qq[0][0], qq[0][1]);
    shared.q_norm[row + 8] = norm(qq[1][2], qq[1][3]);
  }
  __syncthreads();  // norms and gates are there; the tiles' memory is free for the matrices

  float* norms = workspace.norms + (static_cast<int64_t>(chunk) * params.key_heads + key_head) * 2 * kChunk;
  norms[thread] = thread < kChunk ? shared.k_norm[thread] : shared.q_norm[thread - kChunk];
  const float row_k[2] = {-shared.k_norm[row], -shared.k_norm[row + 8]};
  const float row_q[2] = {params.scale * shared.q_norm[row], params.scale * shared.q_norm[row + 8]};
  const auto normalise = [&](float(&k)[8], float(&q)[8], int block) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float2 column_k = *reinterpret_cast<const float2*>(&shared.k_norm[kBlock * block + 2 * i + column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        k[i + e] *= row_k[e / 2] * (e % 2 == 0 ? column_k.x : column_k.y);
        q[i + e] *= row_q[e / 2] * (e % 2 == 0 ? column_k.x : column_k.y);
      }
    }
  };
  normalise(kk.diagonal, qk.diagonal, warp);
#pragma unroll
  for (int j = 0; j < kBlocks - 1; ++j) normalise(kk.below[j], qk.below[j], j);
  for (int j = warp + 1; j < kBlocks; ++j) {  // zeros that stay
    store_block(shared_address(shared.matrix.scores), j, {}, warp, lane);
    store_block(shared_address(shared.matrix.inverse), j, {}, warp, lane);
  }

  for (int i = 0; i < heads; ++i) {
    if (i > 0 && i % kGateBatch == 0) {
      __syncthreads();  // the last head's factors are written
      if (i + warp < heads)
        store_gates(shared.gates[warp], load_gates(params, rows, first_head + i + warp, lane), lane);
      __syncthreads();
    }
    lane = lane_now();
    const Gates& head = shared.gates[i % kGateBatch];
    const int64_t block = static_cast<int64_t>(chunk) * params.value_heads + first_head + i;
    diagonal_block(shared, head, kk, qk, warp, lane);
    invert_diagonal(shared, warp, lane);
    __syncthreads();  // N_ii are there, and the last head's -B_ij N_jj no longer needed
    lane = lane_now();
    blocks_below(shared, head, kk, qk, warp, lane);
    copy_rows_out(workspace.scores + block * kChunk * kChunk, shared.matrix.scores, warp, lane);
    __syncthreads();  // -B_ij N_jj are there, and N_ii no longer needed
    lane = lane_now();
    inverse_row(shared, warp, lane);
    copy_rows_out(workspace.inverse + block * kChunk * kChunk, shared.matrix.inverse, warp, lane);
    // The first warps have least to do.
    if (thread < kChunk)
      store_factors(workspace.factors + block * kFactors * kChunk, head, shared, params.scale, thread);
  }
  if (outlasts) wait_for_earlier_kernels();
}

}  // namespace

cudaError_t launch_prepare(const GatedDeltaParams& params, const Workspace& workspace, int first, int last, bool beside,
                           cudaStream_t stream) {
  constexpr int kBytes = sizeof(PrepareStorage);
  if (const cudaError_t error = cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(workspace.segment_chunks * (last - first));
  config.blockDim = dim3(kWarpgroup);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = beside ? 1 : 0;
  return cudaLaunchKernelEx(&config, prepare, params, workspace, first, last - first);
}

}  // namespace sluice::sm90
