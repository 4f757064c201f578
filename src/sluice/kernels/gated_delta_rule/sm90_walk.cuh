// SPDX-License-Identifier: Apache-2.0
// The walk along the chunks of a sequence that carries a state, forward or backward: how work is dealt out and loaded.
//
// An item is what a piece holds of one sequence and one value head, or (with one consumer warpgroup a CTA, when that is
// what fills the chip) one V half of it. A consumer warpgroup owns 64 of the state's V columns, as S^T [64 v, 128 k] in
// fp32 registers, across all chunks; the V halves never meet. All products are taken transposed, with V along the
// accumulator's rows, so that each result is the next product's left operand in registers: a chunk passes no
// intermediate result through shared memory. The last warpgroup moves data: one warp loads the chunks' tiles into a
// ring of stages, and one a consumer warpgroup carries what that one staged in shared memory out to global memory. CTAs
// are persistent: the loader runs ahead into the next item.
#pragma once

#include "sluice/kernels/gated_delta_rule/sm90_tiles.cuh"

namespace sluice::sm90 {

// Shared memory of one stage, in bytes from its start. `kGroups` consumer warpgroups; kQuery: with q and P.
template <int kGroups, bool kQuery>
struct Stage {
  static constexpr uint32_t k = 0;                              // two tiles [64 t, 64 k]
  static constexpr uint32_t inverse = 2 * kTile;                // N
  static constexpr uint32_t value = inverse + kTile;            // a tile [64 t, 64 v] a group: v, or grad_out
  static constexpr uint32_t factors = value + kGroups * kTile;  // kFactors rows of 64 floats, padded
  static constexpr uint32_t query = factors + 2048;             // two tiles
  static constexpr uint32_t scores = query + 2 * kTile;         // P
  static constexpr uint32_t bytes = kQuery ? scores + kTile : query;
};
constexpr uint32_t kFactorBytes = kFactors * kChunk * sizeof(float);

constexpr int kWalkStages = 3;

// What a consumer warpgroup stages for its storing warp: the first staging tile; the two after it.
enum class Staged { kTokens = 0, kState = 1 };

constexpr bool is_backward(Walk walk) { return walk == Walk::kStateGradients || walk == Walk::kStarts; }
constexpr bool reads_queries(Walk walk) { return walk == Walk::kOutput || is_backward(walk); }
constexpr bool writes_states(Walk walk) { return walk == Walk::kStates || walk == Walk::kStateGradients; }
// Tiles a group stages: [64 t, 64 v] of output, errors or gradients of v; and the state's two.
constexpr int staging_tiles(Walk walk) { return walk == Walk::kOutput ? 1 : writes_states(walk) ? 3 : 0; }

// Shared memory of the CTA: the stages, a staging area for what each group writes, the barriers.
template <Walk kWalk, int kGroups>
struct WalkLayout {
  using Stage = sm90::Stage<kGroups, reads_queries(kWalk)>;
  static constexpr int kStagingTiles = staging_tiles(kWalk);
  static constexpr uint32_t kLimit = 227 * 1024;
  static constexpr uint32_t kStagingBytes = kGroups * kStagingTiles * kTile;
  static constexpr int kStages =
      kWalkStages * Stage::bytes + kStagingBytes + 128 <= kLimit ? kWalkStages : kWalkStages - 1;
  static constexpr uint32_t kStaging = kStages * Stage::bytes;
  static constexpr uint32_t kBarriers = kStaging + kStagingBytes;
  static constexpr uint32_t bytes = kBarriers + (2 * kStages + 4 * kGroups) * 8;
  static_assert(bytes <= kLimit, "shared memory of one multiprocessor");
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;

  __device__ static uint32_t full(uint32_t shared, int stage) { return shared + kBarriers + 8 * stage; }
  __device__ static uint32_t empty(uint32_t shared, int stage) { return shared + kBarriers + 8 * (kStages + stage); }
  __device__ static uint32_t staged(uint32_t shared, int group, Staged what) {
    return shared + kBarriers + 8 * (2 * kStages + 4 * group + static_cast<int>(what));
  }
  __device__ static uint32_t stored(uint32_t shared, int group, Staged what) {
    return staged(shared, group, what) + 16;
  }
  __device__ static uint32_t staging(int group) { return kStaging + group * kStagingTiles * kTile; }

  // Full: each lane that loads, once its copies are there, and one more that announces those of the copy engine.
  // Empty: the consumers. Staged: the consumers of a group. Stored: the group's storing warp.
  __device__ static void init(uint32_t shared) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(full(shared, stage), 32 + 1);
        barrier_init(empty(shared, stage), kGroups * kWarpgroup);
      }
      for (int group = 0; group < kGroups; ++group) {
        for (const Staged what : {Staged::kTokens, Staged::kState}) {
          barrier_init(staged(shared, group, what), kWarpgroup);
          barrier_init(stored(shared, group, what), 32);
        }
      }
      barrier_init_fence();
    }
    __syncthreads();
  }
};

// What the walks read and write by tiles: `value` is v or grad_out, `result` the output, E or the gradient of v.
struct WalkRows {
  TokenRows q, k, value, result;
};
inline cudaError_t make_walk_rows(WalkRows& rows, const GatedDeltaParams& params, const bf16* value,
                                  int64_t value_stride, bf16* result, int result_tokens, int64_t result_stride) {
  const int key_columns = params.key_heads * kHeadDim, value_columns = params.value_heads * kHeadDim;
  for (const cudaError_t error : {make_token_rows(rows.q, params.q, params.tokens, key_columns, params.q_stride),
                                  make_token_rows(rows.k, params.k, params.tokens, key_columns, params.k_stride),
                                  make_token_rows(rows.value, value, params.tokens, value_columns, value_stride),
                                  make_token_rows(rows.result, result, result_tokens, value_columns, result_stride)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The part of a sequence that lies in a piece.
struct WalkItem {
  int piece, sequence, head, group;  // `group`: the V half of the CTA's first consumer warpgroup
  Span span;                         // its tokens
  int first_chunk, chunks;           // the first one's place in the segment
  bool starts, ends;                 // with the sequence
  bool transition;                   // of the piece: from the identity, without values

  // Whether a chunk has fewer tokens than kChunk, so that its tiles came by the threads' copies.
  __device__ bool is_partial(int position) const { return (position + 1) * kChunk > span.last - span.first; }
};
// How many sequences of a piece a walk goes along; a transition counts as one.
template <Walk kWalk>
__device__ int walk_parts(const Workspace& workspace, int piece) {
  const bool first = piece == workspace.first_piece(), last = piece == workspace.last_piece();
  if constexpr (kWalk == Walk::kEnds) {
    if (last || !workspace.is_left(piece)) return 0;
    return !first && workspace.is_crossed(piece) ? 2 : 1;
  } else if constexpr (kWalk == Walk::kStarts) {
    return !first && workspace.is_entered(piece) ? 1 : 0;
  } else {
    const int2 sequences = workspace.piece_sequences[piece];
    return sequences.y - sequences.x;
  }
}
// The segment's item of that index; false where it has fewer.
template <Walk kWalk, int kGroups>
__device__ bool find_walk_item(WalkItem& item, const GatedDeltaParams& params, const Workspace& workspace, int index) {
  constexpr int kParts = 2 / kGroups;
  item.piece = workspace.first_piece();
  for (int count; index >= (count = walk_parts<kWalk>(workspace, item.piece) * params.value_heads * kParts);
       ++item.piece) {
    if (item.piece == workspace.last_piece()) return false;
    index -= count;
  }
  item.group = index % kParts;
  item.head = index / kParts % params.value_heads;
  const int part = index / (kParts * params.value_heads);
  const int2 sequences = workspace.piece_sequences[item.piece];
  item.transition = kWalk == Walk::kEnds && part == 1;
  item.sequence = kWalk == Walk::kEnds ? sequences.y - 1 : sequences.x + part;
  item.span = sequence_span(pack_of(params), item.sequence);
  const int begin = workspace.first_chunk[item.sequence], end = workspace.first_chunk[item.sequence + 1];
  const int piece_begin = item.piece * workspace.piece_chunks, piece_end = piece_begin + workspace.piece_chunks;
  item.starts = begin >= piece_begin;
  item.ends = end <= piece_end;
  const int first = max(begin, piece_begin), last = min(end, piece_end);
  if (!item.ends) item.span.last = item.span.first + (last - begin) * kChunk;
  item.span.first += (first - begin) * kChunk;
  item.first_chunk = first - workspace.segment_begin();
  item.chunks = max(last - first, 0);
  return true;
}
// At most so many items: a sequence more for every place between pieces; or, to their ends, two a piece but one of the
// first and none of the last, and to their starts one but none of the first.
template <Walk kWalk, int kGroups>
int most_walk_items(const GatedDeltaParams& params, const Workspace& workspace) {
  int parts = params.sequences + workspace.segment_pieces - 1;
  if (kWalk == Walk::kEnds) parts = 2 * (workspace.segment_pieces - 2) + 1;
  if (kWalk == Walk::kStarts) parts = workspace.segment_pieces - 1;
  return parts * params.value_heads * (2 / kGroups);
}

struct WalkChunk {
  int64_t first;  // token
  int rows;
  int64_t block;  // index of the chunk and value head in the workspace
};
__device__ inline WalkChunk walk_chunk(const WalkItem& item, int value_heads, int position) {
  const int64_t first = item.span.first + position * kChunk;
  return {first, min(kChunk, static_cast<int>(item.span.last - first)),
          static_cast<int64_t>(item.first_chunk + position) * value_heads + item.head};
}

// The warp that loads.
template <Walk kWalk, int kGroups>
__device__ void load_chunks(const GatedDeltaParams& params, const Workspace& workspace, const WalkRows& rows,
                            uint32_t shared, int lane) {
  using Layout = WalkLayout<kWalk, kGroups>;
  using Stage = typename Layout::Stage;
  constexpr bool kQuery = reads_queries(kWalk);
  constexpr int kTokenTiles = (kQuery ? 4 : 2) + kGroups;
  RingPosition<Layout::kStages> ring;
  WalkItem item;
  for (int index = blockIdx.x; find_walk_item<kWalk, kGroups>(item, params, workspace, index); index += gridDim.x) {
    const int key_column = item.head / (params.value_heads / params.key_heads) * kHeadDim;
    const int value_column = item.head * kHeadDim + item.group * kHalf;
    for (int i = 0; i < item.chunks; ++i, ring.advance()) {
      const WalkChunk chunk = walk_chunk(item, params.value_heads, is_backward(kWalk) ? item.chunks - 1 - i : i);
      const uint32_t stage = shared + ring.stage * Stage::bytes;
      const uint32_t full = Layout::full(shared, ring.stage);
      const auto load = [&](uint32_t tile, const TokenRows& source, int column) {
        load_token_tile(stage + tile, source, chunk.first, column, chunk.rows, full, lane);
      };
      barrier_wait(Layout::empty(shared, ring.stage), ring.parity ^ 1);
      if (lane == 0) {
        barrier_arrive_expect(full,
                              kFactorBytes + (kQuery ? 2 : 1) * kTile + kTokenTiles * tile_arrival_bytes(chunk.rows));
        bulk_load(stage + Stage::factors, workspace.factors + chunk.block * kFactors * kChunk, kFactorBytes, full);
        bulk_load(stage + Stage::inverse, workspace.inverse + chunk.block * kChunk * kChunk, kTile, full);
        if (kQuery) bulk_load(stage + Stage::scores, workspace.scores + chunk.block * kChunk * kChunk, kTile, full);
      }
      for (int half = 0; half < 2; ++half) {
        load(Stage::k + half * kTile, rows.k, key_column + half * kHalf);
        if (kQuery) load(Stage::query + half * kTile, rows.q, key_column + half * kHalf);
      }
      for (int group = 0; group < kGroups; ++group) {
        load(Stage::value + group * kTile, rows.value, value_column + group * kHalf);
      }
      copy_arrive(full);
    }
  }
}

// A storing warp: the first staged tile of each chunk, to `result`, which begins at token `first_token`; and, where the
// walk writes states, the other two to the chunk's of `states`.
template <Walk kWalk, int kGroups>
__device__ void store_chunks(const GatedDeltaParams& params, const Workspace& workspace, const TokenRows& result,
                             int first_token, bf16* states, uint8_t* memory, int group, int lane) {
  using Layout = WalkLayout<kWalk, kGroups>;
  constexpr bool kStates = writes_states(kWalk);
  const uint32_t shared = shared_address(memory);
  uint8_t* const staging = memory + Layout::staging(group);
  RingPosition<1> turn;
  WalkItem item;
  bool is_first = true;
  // Says that what was staged may be overwritten. With states that is said of the one staged before the last, since to
  // wait for a store just begun takes long.
  const auto release = [&](Staged what) {
    if (lane == 0) bulk_store_wait_read<kStates ? 1 : 0>();
    __syncwarp();
    barrier_arrive(Layout::stored(shared, group, what));
  };
  for (int index = blockIdx.x; find_walk_item<kWalk, kGroups>(item, params, workspace, index); index += gridDim.x) {
    const int half = item.group + group;
    for (int i = 0; i < item.chunks; ++i, turn.advance(), is_first = false) {
      const WalkChunk chunk = walk_chunk(item, params.value_heads, is_backward(kWalk) ? item.chunks - 1 - i : i);
      if constexpr (kStates) {
        barrier_wait(Layout::staged(shared, group, Staged::kState), turn.parity);
        if (lane == 0) {
          fence_async_proxy();  // here, not in the warpgroup that all wait for
          bulk_store(states + (chunk.block * 2 + half) * kHalf * kHeadDim, shared_address(staging) + kTile, 2 * kTile);
          bulk_store_commit();
        }
        if (!is_first) release(Staged::kTokens);
      }
      barrier_wait(Layout::staged(shared, group, Staged::kTokens), turn.parity);
      store_token_tile(result, chunk.first - first_token, item.head * kHeadDim + half * kHalf, chunk.rows, staging,
                       lane);
      release(kStates ? Staged::kState : Staged::kTokens);
    }
  }
  if (lane == 0) bulk_store_wait();
}

// The thread's part of a state S^T [64 v, 128 k]: its element `i` of the accumulator is S[k][v].
struct StateElement {
  int k, v;
};
__device__ inline StateElement state_element(int i, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  return {8 * (i / 4) + 2 * (lane % 4) + (i & 1), 16 * warp + lane / 4 + 8 * ((i >> 1) & 1)};
}
// `memory` [K, V] of the value head, null for zeros; `column` the first of the 64 V columns.
__device__ inline void load_state(float (&state)[64], const float* memory, int column, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const StateElement at = state_element(i, thread);
    state[i] = memory ? memory[at.k * kHeadDim + column + at.v] : 0.f;
  }
}
__device__ inline void set_identity(float (&state)[64], int column, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const StateElement at = state_element(i, thread);
    state[i] = at.k == column + at.v ? 1.f : 0.f;
  }
}
__device__ inline void store_state(float* memory, const float (&state)[64], int column, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const StateElement at = state_element(i, thread);
    memory[at.k * kHeadDim + column + at.v] = state[i];
  }
}

// A factor for each column t of an accumulator [64 v, 64 t]: those of this thread's columns. Loaded while products are
// under way.
struct ColumnFactors {
  float2 value[8];
  __device__ ColumnFactors(const float* factor, int lane) {
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = *reinterpret_cast<const float2*>(factor + 8 * j + 2 * (lane % 4));
  }
  __device__ void scale(float (&d)[32]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      d[4 * j] *= value[j].x;
      d[4 * j + 1] *= value[j].y;
      d[4 * j + 2] *= value[j].x;
      d[4 * j + 3] *= value[j].y;
    }
  }
};

// d [64 v, 64 t] (+)= state^T [64 v, 128 k] rows^T [128 k, 64 t], where `rows` are two tiles [64 t, 64 k].
__device__ inline void multiply_state(float (&d)[32], const uint32_t (&state)[8][4], uint32_t rows) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    mma_64x64<Major::kSummedColumns>(
        d, state[step], operand_step<Major::kSummedColumns>(operand(rows + step / 4 * kTile), step % 4), step > 0);
  }
}
// d [64 v, 64] (+)= a [64 v, 64] b, where b is a tile, summed along its columns or its rows.
template <Major kMajor>
__device__ inline void multiply_tile(float (&d)[32], const uint32_t (&a)[4][4], uint32_t b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    mma_64x64<kMajor>(d, a[step], operand_step<kMajor>(operand(b), step), accumulate || step > 0);
}
// state [64 v, 128 k] += a [64 v, 64 t] rows [64 t, 128 k].
__device__ inline void add_outer_products(float (&state)[64], const uint32_t (&a)[4][4], uint32_t rows) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_64x128<Major::kSummedRows>(state, a[step], operand_step<Major::kSummedRows>(operand(rows, kTile), step), true);
  }
}

// The first token of the segment in work, whose rows of `error` begin there.
__device__ inline int segment_token(const GatedDeltaParams& params, const Workspace& workspace) {
  const int begin = workspace.segment_begin();
  return begin < workspace.segment_end(params.sequences) ? workspace.chunk_rows[begin].x : 0;
}

// One consumer warpgroup a CTA and twice the CTAs while they fit on the chip at once: then its chain of products, which
// is what binds, has a multiprocessor to itself.
template <Walk kWalk>
bool split_values(const GatedDeltaParams& params, const Workspace& workspace, int multiprocessors) {
  return most_walk_items<kWalk, 1>(params, workspace) <= multiprocessors;
}

// Of the current device; a launch will say where there is none.
inline int multiprocessors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace sluice::sm90
