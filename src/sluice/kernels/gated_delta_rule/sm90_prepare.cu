// SPDX-License-Identifier: Apache-2.0
// What can be computed for every chunk at once: the list of chunks, and per chunk the matrices N and P and the factors
// of sm90.cuh. A CTA of one warpgroup owns a chunk and a key head: K K^T and Q K^T are computed once, then used for
// each of the key head's value heads. Traffic: q and k read once, 16 KiB + 1.25 KiB written a chunk and value head.
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

constexpr int kBlock = 16;  // diagonal blocks are inverted by substitution, the others by tensor cores
constexpr int kBlocks = kChunk / kBlock;
constexpr int kMatrixStride = 68;  // floats a row: 4 more than 64 spread the rows over the banks
constexpr int kProductStride = 20;

constexpr int kGateBatch = 4;  // value heads whose gates are loaded at once, one a warp

struct PrepareStorage {
  union {
    struct {
      alignas(1024) uint8_t k[2 * kTile];
      uint8_t q[2 * kTile];
    } input;
    struct {
      alignas(1024) uint8_t scores[kTile];
      float coupling[kChunk][kMatrixStride];  // B
      float inverse[kChunk][kMatrixStride];   // N
    } matrix;
  };
  float product[kBlocks][kBlock][kProductStride];  // one a warp
  float gate[kGateBatch][kChunk], beta[kGateBatch][kChunk];
  float k_norm[kChunk], q_norm[kChunk];
  uint64_t loaded;
};

__device__ uint32_t to_tf32(float x) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

// d [16, 8] += a [16, 8] b [8, 8], tf32, one warp.
__device__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d [16, 16] += a [16, 16] b [16, 16] in shared memory, one warp.
__device__ void multiply_blocks(float (&d)[2][4], const float* a, int a_stride, const float* b, int b_stride,
                                int lane) {
  const int row = lane / 4, column = lane % 4;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const float* a_step = a + step * 8;
    const uint32_t left[4] = {to_tf32(a_step[row * a_stride + column]), to_tf32(a_step[(row + 8) * a_stride + column]),
                              to_tf32(a_step[row * a_stride + column + 4]),
                              to_tf32(a_step[(row + 8) * a_stride + column + 4])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* b_step = b + step * 8 * b_stride + half * 8;
      const uint32_t right[2] = {to_tf32(b_step[column * b_stride + row]),
                                 to_tf32(b_step[(column + 4) * b_stride + row])};
      mma_tf32(d[half], left, right);
    }
  }
}

// Stores sign * d [16, 16].
__device__ void store_block(float* destination, int stride, const float (&d)[2][4], float sign, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      destination[(lane / 4 + 8 * (e >> 1)) * stride + half * 8 + 2 * (lane % 4) + (e & 1)] = sign * d[half][e];
    }
  }
}

// N = (I + B)^-1 for the strictly lower triangular B. Diagonal blocks by forward substitution in fp32, which stays
// exact where equal keys make large cancelling powers of B; then warp j solves its block column downwards: N_ij = -N_ii
// sum_k B_ik N_kj.
__device__ void invert(PrepareStorage& shared, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  auto& coupling = shared.matrix.coupling;
  auto& inverse = shared.matrix.inverse;
  if (lane < kBlock) {
    const int base = warp * kBlock;
    float column[kBlock];  // of N's diagonal block
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float partial[4] = {i == lane ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 b = *reinterpret_cast<const float4*>(&coupling[base + i][base + j]);
        partial[0] -= b.x * column[j];
        if (j + 1 < i) partial[1] -= b.y * column[j + 1];
        if (j + 2 < i) partial[2] -= b.z * column[j + 2];
        if (j + 3 < i) partial[3] -= b.w * column[j + 3];
      }
      column[i] = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) inverse[base + i][base + lane] = column[i];
  }
  __syncthreads();
  float* product = &shared.product[warp][0][0];
  for (int i = warp + 1; i < kBlocks; ++i) {
    float sum[2][4] = {};
    for (int m = warp; m < i; ++m) {
      multiply_blocks(sum, &coupling[i * kBlock][m * kBlock], kMatrixStride, &inverse[m * kBlock][warp * kBlock],
                      kMatrixStride, lane);
    }
    store_block(product, kProductStride, sum, 1.f, lane);
    __syncwarp();
    float block[2][4] = {};
    multiply_blocks(block, &inverse[i * kBlock][i * kBlock], kMatrixStride, product, kProductStride, lane);
    store_block(&inverse[i * kBlock][warp * kBlock], kMatrixStride, block, -1.f, lane);
    __syncwarp();
  }
  __syncthreads();
}

// Two threads a row: 1 / sqrt(sum of squares + epsilon), for the rows of k and q.
__device__ void row_norms(PrepareStorage& shared, bool qk_l2norm, int thread) {
  const int row = thread / 2, half = thread % 2;
  float sum[2] = {};
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const uint8_t* tile = (which == 0 ? shared.input.k : shared.input.q) + half * kTile;
#pragma unroll
    for (int vector = 0; vector < 8; ++vector) {
      const uint4 data = *reinterpret_cast<const uint4*>(tile + tile_offset(row, vector * 8));
      for (const uint32_t pair : {data.x, data.y, data.z, data.w}) {
        const float2 x = unpack(pair);
        sum[which] += x.x * x.x + x.y * x.y;
      }
    }
    sum[which] += __shfl_xor_sync(~0u, sum[which], 1);
  }
  if (half == 0) {
    shared.k_norm[row] = qk_l2norm ? rsqrtf(sum[0] + kNormEpsilon) : 1.f;
    shared.q_norm[row] = qk_l2norm ? rsqrtf(sum[1] + kNormEpsilon) : 1.f;
  }
}

// Running sum of g over the chunk, and beta; both neutral beyond the last token. One warp.
__device__ void load_gates(float* gates, float* betas, const GatedDeltaParams& params, int2 rows, int head, int lane) {
  float gate[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const int64_t index = static_cast<int64_t>(rows.x + row) * params.value_heads + head;
    gate[i] = row < rows.y ? params.g[index] : 0.f;
    beta[i] = row < rows.y ? params.beta[index] : 0.f;
  }
  gate[1] += gate[0];
  float sum = gate[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    gates[2 * lane + i] = before + gate[i];
    betas[2 * lane + i] = beta[i];
  }
}

__device__ void store_factors(float* factors, const float* gates, const float* betas, const PrepareStorage& shared,
                              float scale, int row) {
  const float gate = gates[row], last = gates[kChunk - 1], beta = betas[row];
  const float decay = __expf(gate);
  factors[kPredict * kChunk + row] = decay * shared.k_norm[row];
  factors[kWrite * kChunk + row] = beta * __expf(last - gate) * shared.k_norm[row];
  factors[kRead * kChunk + row] = scale * decay * shared.q_norm[row];
  factors[kGate * kChunk + row] = gate;
  factors[kBeta * kChunk + row] = beta;
}

__global__ __launch_bounds__(kWarpgroup, 4) void prepare(GatedDeltaParams params, Workspace workspace,
                                                         int first_key_head) {
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<PrepareStorage*>(raw);
  const int chunk = blockIdx.x, key_head = first_key_head + blockIdx.y;  // the chunk's place in the segment
  // The kernel after this one waits for this one alone; so it must outlast the walk beside which it runs.
  const bool outlasts = chunk == 0 && blockIdx.y == 0;
  if (workspace.segment_begin() + chunk >= workspace.segment_end(params.sequences)) {
    if (outlasts) wait_for_earlier_kernels();
    return;
  }
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int2 rows = workspace.chunk_rows[workspace.segment_begin() + chunk];

  const uint32_t loaded = shared_address(&shared.loaded);
  if (thread == 0) {
    barrier_init(loaded, kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
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
  const int heads = params.value_heads / params.key_heads;
  const auto load_gate_batch = [&](int first) {
    if (first + warp < heads) {
      load_gates(shared.gate[warp], shared.beta[warp], params, rows, key_head * heads + first + warp, lane);
    }
  };
  load_gate_batch(0);
  barrier_wait(loaded, 0);
  fence_async_proxy();
  row_norms(shared, params.qk_l2norm, thread);

  float kk[32], qk[32];  // [64 t, 64 s]
  mma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint64_t key = operand_step<Major::kSummedColumns>(operand(k_tiles + step / 4 * kTile), step % 4);
    const uint64_t query = operand_step<Major::kSummedColumns>(operand(q_tiles + step / 4 * kTile), step % 4);
    mma_64x64<Major::kSummedColumns, Major::kSummedColumns>(kk, key, key, step > 0);
    mma_64x64<Major::kSummedColumns, Major::kSummedColumns>(qk, query, key, step > 0);
  }
  mma_commit();
  mma_wait<0>();
  pin(kk);
  pin(qk);
  __syncthreads();  // norms and gates written; the tiles' memory is free for the matrices

  float* norms = workspace.norms + (static_cast<int64_t>(chunk) * params.key_heads + key_head) * 2 * kChunk;
  norms[thread] = thread < kChunk ? shared.k_norm[thread] : shared.q_norm[thread - kChunk];

  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  const float row_k[2] = {shared.k_norm[row], shared.k_norm[row + 8]};
  const float row_q[2] = {params.scale * shared.q_norm[row], params.scale * shared.q_norm[row + 8]};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float column_k = shared.k_norm[8 * (i / 4) + column + (i & 1)];
    kk[i] *= row_k[(i >> 1) & 1] * column_k;
    qk[i] *= row_q[(i >> 1) & 1] * column_k;
  }
  for (int i = 0; i < heads; ++i) {
    if (i > 0 && i % kGateBatch == 0) {
      load_gate_batch(i);
      __syncthreads();
    }
    const int64_t block = static_cast<int64_t>(chunk) * params.value_heads + key_head * heads + i;
    const float* gates = shared.gate[i % kGateBatch];
    const float* betas = shared.beta[i % kGateBatch];
    if (thread < kChunk)
      store_factors(workspace.factors + block * kFactors * kChunk, gates, betas, shared, params.scale, thread);

    uint32_t scores[4][4] = {};
    const float row_gate[2] = {gates[row], gates[row + 8]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j / 2 > warp) continue;  // above the diagonal
      const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * j + column);
      const float2 beta = *reinterpret_cast<const float2*>(betas + 8 * j + column);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = row + 8 * e, s = 8 * j + column;
        // Masked before the exponential: above the diagonal the exponent may be large.
        const float first = __expf(t >= s ? row_gate[e] - gate.x : -INFINITY) * beta.x;
        const float second = __expf(t >= s + 1 ? row_gate[e] - gate.y : -INFINITY) * beta.y;
        scores[j / 2][2 * (j % 2) + e] = pack(qk[4 * j + 2 * e] * first, qk[4 * j + 2 * e + 1] * second);
        *reinterpret_cast<float2*>(&shared.matrix.coupling[t][s]) = {kk[4 * j + 2 * e] * first,
                                                                     kk[4 * j + 2 * e + 1] * second};
      }
    }
    store_rows(shared_address(shared.matrix.scores), scores, thread);
    __syncthreads();
    invert(shared, thread);
    uint8_t* const inverse_tile = reinterpret_cast<uint8_t*>(workspace.inverse + block * kChunk * kChunk);
    uint8_t* const scores_tile = reinterpret_cast<uint8_t*>(workspace.scores + block * kChunk * kChunk);
#pragma unroll
    for (int index = thread; index < kChunk * 8; index += kWarpgroup) {
      const int t = index / 8, s = ((index ^ t) & 7) * 8;  // the element at vector `index` of the tile
      uint4 data = {0, 0, 0, 0};
      if (t / kBlock >= s / kBlock) {  // the blocks above the diagonal were not written
        const float4 low = *reinterpret_cast<const float4*>(&shared.matrix.inverse[t][s]);
        const float4 high = *reinterpret_cast<const float4*>(&shared.matrix.inverse[t][s + 4]);
        data = {pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w)};
      }
      *reinterpret_cast<uint4*>(inverse_tile + index * 16) = data;
      *reinterpret_cast<uint4*>(scores_tile + index * 16) =
          *reinterpret_cast<const uint4*>(shared.matrix.scores + index * 16);
    }
    __syncthreads();
  }
  if (outlasts) wait_for_earlier_kernels();
}

}  // namespace

cudaError_t launch_index(const GatedDeltaParams& params, const Workspace& workspace, cudaStream_t stream) {
  index_chunks<<<1, kIndexThreads, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

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
  config.gridDim = dim3(workspace.segment_chunks, last - first);
  config.blockDim = dim3(kWarpgroup);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = beside ? 1 : 0;
  return cudaLaunchKernelEx(&config, prepare, params, workspace, first);
}

}  // namespace sluice::sm90
