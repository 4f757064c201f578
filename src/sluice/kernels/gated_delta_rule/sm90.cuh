// SPDX-License-Identifier: Apache-2.0
// What the kernels of the gated delta rule share.
//
// The chunked form, for one value head and one chunk of 64 tokens (rows t, s; G the running sum of g within the chunk,
// G_C its last value; S the state at the chunk's start; k~ = rk k and q~ = rq q the normalised rows):
//   B_ts = (k~_t . k~_s) e^(G_t - G_s) beta_s  for t > s        N = (I + B)^-1
//   P_ts = scale (q~_t . k~_s) e^(G_t - G_s) beta_s  for t >= s
//   X  = V - e^G (K~ S)              E = N X     (row t of E is v_t - S_{t-1}^T k~_t, the error that beta_t scales)
//   O  = scale e^G (Q~ S) + P E
//   S' = e^G_C S + sum_t beta_t e^(G_C - G_t) k~_t E_t^T
// No exponent is positive. N and P do not depend on the state: `prepare` computes them for all chunks at once. The raw
// rows of q and k are the matrix operands (bf16, exact); their norms enter as fp32 factors.
#pragma once

#include <cstdint>

#include "sluice/kernels/common/lanes.cuh"
#include "sluice/kernels/common/packing.cuh"
#include "sluice/kernels/common/sm90_copy.cuh"
#include "sluice/kernels/common/sm90_wgmma.cuh"
#include "sluice/kernels/gated_delta_rule/params.h"

namespace sluice::sm90 {

using bf16 = __nv_bfloat16;

constexpr int kChunk = 64;     // tokens; the rows of one warpgroup's matrix product
constexpr int kHeadDim = 128;  // K and V
constexpr int kHalf = 64;      // columns of one tile: K and V are two of them
constexpr int kWarpgroup = 128;
constexpr uint32_t kTile = tile_bytes(kChunk);  // [64, 64] bf16: 8 KiB
constexpr float kNormEpsilon = 1e-6f;

// Per chunk and value head, rows of 64 floats.
enum Factor {
  kPredict = 0,  // e^G rk: K S to the decayed prediction
  kWrite = 1,    // beta e^(G_C - G) rk: from E to the state
  kRead = 2,     // scale e^G rq: Q S to the output
  kGate = 3,     // G
  kBeta = 4,
  kFactors = 5,
};

// The chunks of all sequences, one behind the other, are cut into pieces of `piece_chunks`, and these are taken by
// segments of `segment_pieces`; both differ from sequences. Both passes work on one segment at a time, the backward
// pass from the last to the first, so that their intermediate results take the memory of few. The state at a piece's
// start is a checkpoint, which the forward pass leaves to the next segment and to the backward pass; its gradient at
// the end comes from the piece after (carry). While a walk goes along one segment, on part of the multiprocessors,
// `prepare` works on the next on the others; and where walks leave enough of them idle, so does `gradients`, or a part
// of it, on the one before, which the walks of the pass have left.
//
// With few heads a segment has several pieces, which are walked side by side. That takes the states between them: a
// piece is first walked from a state of zero, to Z at its end, and once more without values from the identity, to its
// transition M; the state at its end is then M S + Z, which the pieces hand on one after the other (sm90_join.cu).
// The backward pass has the checkpoints, and needs the transitions' transposes for its carries.
//
// Intermediate results in global memory. `chunks` is the number of a segment; the index of a chunk in it is the place
// in the segment.
struct Workspace {
  int32_t* first_chunk;   // [n + 1], of each sequence; the last is the number of chunks
  int2* chunk_rows;       // [all chunks]: first token, number of tokens
  int2* piece_sequences;  // [pieces]: first sequence and one past the last of which a piece holds chunks
  // Of `prepare`; places that segments take in turn:
  bf16* inverse;   // [chunks, Hv] tiles [64, 64]: N
  bf16* scores;    // [chunks, Hv] tiles [64, 64]: P
  float* factors;  // [chunks, Hv, kFactors, 64]
  float* norms;    // [chunks, Hk, 2, 64]: rk, rq
  // Of the backward pass's walks, in places likewise:
  bf16* error;       // [64 chunks, Hv, V]: E, by token from the segment's first
  bf16* state;       // [chunks, Hv, 2 (V half), 2 (K half)] tiles [64 v, 64 k]: S at the chunk's start
  bf16* state_grad;  // likewise: gradient of S at the chunk's end
  // Of the backward pass:
  float* carry;  // [segment_pieces + 1, Hv, K, V]: gradient of the state at a piece's start, in places by turns
  int pieces, piece_chunks, segments, segment_pieces, segment_chunks;
  int segment;  // the one in work
  int prepared_places, walked_places;
  size_t prepared_bytes, walked_bytes;  // of a place
  size_t bytes;

  __device__ int segment_begin() const { return segment * segment_chunks; }  // the segment's first chunk
  __device__ int segment_end(int sequences) const {
    return min(segment_begin() + segment_chunks, first_chunk[sequences]);
  }
  __device__ int first_piece() const { return segment * segment_pieces; }
  __device__ int last_piece() const { return first_piece() + segment_pieces - 1; }

  // Whether a piece holds chunks of a sequence that began before it; of one that goes on after it; the same one both,
  // so that it is all that the piece holds.
  __device__ bool is_entered(int piece) const {
    const int2 sequences = piece_sequences[piece];
    return sequences.x < sequences.y && first_chunk[sequences.x] < piece * piece_chunks;
  }
  __device__ bool is_left(int piece) const {
    const int2 sequences = piece_sequences[piece];
    return sequences.x < sequences.y && first_chunk[sequences.y] > (piece + 1) * piece_chunks;
  }
  __device__ bool is_crossed(int piece) const {
    const int2 sequences = piece_sequences[piece];
    return sequences.y == sequences.x + 1 && is_entered(piece) && is_left(piece);
  }

  // [Hv, K, V] by piece: the state at its start, where a sequence enters it; its transition, in memory of [K, K], where
  // one crosses it; the gradient of the state at its start.
  __device__ float* checkpoint(const GatedDeltaParams& params, int piece) const {
    return params.checkpoints + (piece - 1) * state_size(params);
  }
  __device__ float* transition(const GatedDeltaParams& params, int piece) const {
    return params.checkpoints + (pieces - 1 + piece - 1) * state_size(params);
  }
  __device__ float* carried(const GatedDeltaParams& params, int piece) const {
    return carry + piece % (segment_pieces + 1) * state_size(params);
  }
  __device__ static int64_t state_size(const GatedDeltaParams& params) {
    return static_cast<int64_t>(params.value_heads) * kHeadDim * kHeadDim;
  }
};
// How the chunks are cut.
struct Cut {
  int piece_chunks, segment_pieces;
};
// kBackwardBeside: with gradients of one segment beside the walks along the next.
enum class Pass { kForward, kBackward, kBackwardBeside };
// With the first segment in work.
Workspace make_workspace(const GatedDeltaParams& params, Cut cut, Pass pass);
Workspace with_segment(Workspace workspace, int segment);

// Of chunks: the true number is known on the device alone.
inline int chunk_bound(const GatedDeltaParams& params) { return params.tokens / kChunk + params.sequences; }

cudaError_t launch_index(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream);
// Key heads [first, last). `beside`: may begin once the kernel before has begun, a walk along another segment.
cudaError_t launch_prepare(const GatedDeltaParams& params, const Workspace& workspace, int first, int last, bool beside,
                           cudaStream_t stream);

// What a walk along the chunks of a sequence does: forward (sm90_forward.cu), to the states at the ends of a segment's
// pieces but the last (kEnds), or with all that the pass wants of it; backward (sm90_backward.cu), to the gradients at
// the starts of a segment's pieces but the first (kStarts), or with all.
enum class Walk { kOutput, kStates, kEnds, kStateGradients, kStarts };
template <Walk kWalk>
cudaError_t launch_forward_walk(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream);
template <Walk kWalk>
cudaError_t launch_backward_walk(const GatedDeltaBackwardParams& params, const Workspace& workspace,
                                 cudaStream_t stream);
// After kEnds or kStarts: the states, or their gradients, between the segment's pieces.
cudaError_t launch_join_forward(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream);
cudaError_t launch_join_backward(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream);
// The part [first, last], 0 to 1, of the segment's items, a chunk and key head each, on that many multiprocessors.
cudaError_t launch_gradients(const GatedDeltaBackwardParams& params, const Workspace& workspace, float first,
                             float last, int multiprocessors, cudaStream_t stream);

// e^x for x <= 0; zero where that is too small for a normal number, which __expf takes three more instructions to tell.
__device__ inline float decay_of(float x) { return fast_exp2(x * 1.44269504f); }

__device__ inline PackView pack_of(const GatedDeltaParams& params) {
  return {params.cu_seqlens, params.sequences, params.tokens};
}

// Copies a [64, 64] tile of token rows; rows from `rows` on become zeros. `source` points at the first row and column;
// the distance between rows is `stride` elements. Called by `kThreads` threads.
template <int kThreads>
__device__ inline void copy_token_tile(uint32_t tile, const bf16* source, int64_t stride, int rows, int thread) {
  const int first = thread / 8, vector = thread % 8;
  source += first * stride + vector * 8;
#pragma unroll
  for (int i = 0; i < kChunk; i += kThreads / 8) {
    copy_16_or_zero(tile + tile_offset(first + i, vector * 8), source, first + i < rows);
    source += kThreads / 8 * stride;
  }
}

// Stores a [64, 64] tile to token rows, the first `rows` of them. Called by `kThreads` threads.
template <int kThreads>
__device__ inline void store_token_tile(bf16* destination, int64_t stride, int rows, const uint8_t* tile, int thread) {
  const int first = thread / 8, vector = thread % 8;
  destination += first * stride + vector * 8;
#pragma unroll
  for (int i = 0; i < kChunk; i += kThreads / 8) {
    if (first + i < rows) {
      *reinterpret_cast<uint4*>(destination) =
          *reinterpret_cast<const uint4*>(tile + tile_offset(first + i, vector * 8));
    }
    destination += kThreads / 8 * stride;
  }
}

}  // namespace sluice::sm90
