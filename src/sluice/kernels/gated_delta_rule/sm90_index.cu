// SPDX-License-Identifier: Apache-2.0
// The list of chunks, and which sequences the pieces hold.
#include "sluice/kernels/gated_delta_rule/sm90.cuh"

namespace sluice::sm90 {
namespace {

constexpr int kIndexThreads = 1024;

// The sequence that holds a chunk: the last that starts at or before it.
__device__ int sequence_of(const Workspace& workspace, int sequences, int chunk) {
  int low = 0, high = sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (workspace.first_chunk[middle] <= chunk ? low : high) = middle;
  }
  return low;
}

// Fills first_chunk, chunk_rows and piece_sequences. One CTA.
__global__ void index_chunks(GatedDeltaParams params, Workspace workspace) {
  __shared__ int32_t warp_sum[32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int before = 0;  // chunks of the sequences already counted
  for (int base = 0; base < params.sequences; base += kIndexThreads) {
    const int sequence = base + thread;
    int count = 0;
    if (sequence < params.sequences) {
      const Span span = sequence_span(pack_of(params), sequence);
      check_span("gated_delta_rule", pack_of(params), sequence);
      count = (span.last - span.first + kChunk - 1) / kChunk;
    }
    int sum = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) sum += warp_sum[w];
      total += warp_sum[w];
    }
    if (sequence < params.sequences) workspace.first_chunk[sequence] = before + sum - count;
    before += total;
    __syncthreads();
  }
  if (thread == 0) workspace.first_chunk[params.sequences] = before;
  __syncthreads();
  for (int chunk = thread; chunk < before; chunk += kIndexThreads) {
    const int sequence = sequence_of(workspace, params.sequences, chunk);
    const Span span = sequence_span(pack_of(params), sequence);
    const int first = span.first + (chunk - workspace.first_chunk[sequence]) * kChunk;
    workspace.chunk_rows[chunk] = {first, min(kChunk, span.last - first)};
  }
  // Every sequence belongs to a piece, empty ones too: those from the first chunk's to, where that one begins before
  // it, the next piece's first included.
  for (int piece = thread; piece < workspace.pieces; piece += kIndexThreads) {
    const int begin = piece * workspace.piece_chunks, end = begin + workspace.piece_chunks;
    int2 sequences = {0, params.sequences};
    if (piece > 0) sequences.x = begin < before ? sequence_of(workspace, params.sequences, begin) : params.sequences;
    if (end < before) {
      const int next = sequence_of(workspace, params.sequences, end);
      sequences.y = workspace.first_chunk[next] < end ? next + 1 : next;
    }
    workspace.piece_sequences[piece] = sequences;
  }
}

}  // namespace

cudaError_t launch_index(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  index_chunks<<<1, kIndexThreads, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

}  // namespace sluice::sm90
