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
// registers. Three consumer warpgroups: two own half of K's columns each of dq and dk and form H, J, F, and one V half
// each of <S, dS'>, one product on the tensor cores while the one before is summed; the third owns the pairs (s, t),
// with R, D and, once an item, q k^T and k k^T, all transposed, and finishes dg and dbeta. The producer warpgroup
// streams dO, E, dV (16 KiB each), S and dS' (32 KiB each) of each value head through a ring of 16 KiB slots; k and q
// stay for the whole item. CTAs are persistent. Traffic: 112 KiB read a chunk and value head.
#include <algorithm>

#include "sluice/kernels/common/shared_memory.cuh"
#include "sluice/kernels/gated_delta_rule/sm90_gradients.cuh"

namespace sluice::sm90 {
namespace {

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
    copy_tokens(shared_address(shared.k) + half * kTile, k + half * kHalf, params.k_stride, item.rows, thread);
    copy_tokens(shared_address(shared.q) + half * kTile, q + half * kHalf, params.q_stride, item.rows, thread);
  }
  copy_arrive(full);
}

__device__ void produce(const GatedDeltaBackwardParams& backward, const Workspace& workspace, GradientItems items,
                        GradientStorage& shared, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int heads = params.value_heads / params.key_heads;
  const int error_token = segment_token(params, workspace);
  RingPosition<kSlots> ring;
  RingPosition<1> keys;
  for (int index = items.first + blockIdx.x; index < items.last; index += gridDim.x, keys.advance()) {
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
          const int64_t stride = slot == kOutGrad ? backward.grad_out_stride
                                 : slot == kError ? static_cast<int64_t>(params.value_heads) * kHeadDim
                                                  : backward.grad_v_stride;
          source += (slot == kError ? item.first - error_token : item.first) * stride + head * kHeadDim;
          if (thread == 0) {
            const uint32_t bytes = sizeof(shared.gates[0]);
            barrier_arrive_expect(full, slot == kError ? bytes : 0);
            if (slot == kError) {
              bulk_load(shared_address(shared.gates[ring.stage]),
                        workspace.factors + (block * kFactors + kGate) * kChunk, bytes, full);
            }
          }
          for (int half = 0; half < 2; ++half) {
            copy_tokens(destination + half * kTile, source + half * kHalf, stride, item.rows, thread);
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
    const float beta_grad = write + sums.beta[row];
    const float read = backward.forward.scale * q_norm * (sums.read[0][row] + sums.read[1][row]);
    const float predict = k_norm * (sums.predict[0][row] + sums.predict[1][row]);
    gate_grad[i] = __expf(gate[i]) * (read - predict) - beta[i] * beta_grad;
    for (int warp = 0; warp < kWarps; ++warp) gate_grad[i] += sums.gate[warp][row];
    write_total += beta[i] * write;
    if (row < item.rows) backward.grad_beta[(item.first + row) * backward.forward.value_heads + head] = beta_grad;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) write_total += __shfl_xor_sync(~0u, write_total, mask);
  float states = 0.f;
  for (int half = 0; half < kHalves; ++half) {
    for (int warp = 0; warp < kWarps; ++warp) states += sums.states[half][warp];
  }
  const float last = write_total + __expf(last_gate) * states;  // what the last row has more, and so all rows' sums
  gate_grad[0] += gate_grad[1];
  float sum = gate_grad[0];  // of this lane's rows and all later ones
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_down_sync(~0u, sum, distance);
    if (lane + distance < 32) sum += other;
  }
  float after = __shfl_down_sync(~0u, sum, 1);
  if (lane == 31) after = 0.f;
  after += last;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row < item.rows)
      backward.grad_g[(item.first + row) * backward.forward.value_heads + head] = after + gate_grad[i];
  }
}

// The consumer of the pairs: R, D and what follows from them; <S, dS'>; dg and dbeta.
__device__ void consume_pairs(const GatedDeltaBackwardParams& backward, const Workspace& workspace, GradientItems items,
                              GradientStorage& shared, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const PairBlocks blocks(thread);
  const int warp = blocks.warp, lane = blocks.lane;
  const int heads = params.value_heads / params.key_heads;
  const uint32_t k = shared_address(shared.k), q = shared_address(shared.q), staging = shared_address(shared.staging);
  const uint32_t staging_full = shared_address(&shared.staging_full);
  // x = left [64 s, 128] right [64 t, 128]^T, of two tiles each; `meanwhile` while the tensor cores work.
  const auto multiply = [&](float(&x)[kPairs], uint32_t left, uint32_t right, auto meanwhile) {
    float product[32];
    mma_fence();
    multiply_rows(product, left, right);
    mma_commit();
    meanwhile();
    mma_wait<0>();
    pin(product);
    blocks.take(x, product);
  };

  SlotReader slots{shared, lane, {}};
  RingPosition<1> keys;
  RingPosition<2> turn;
  for (int index = items.first + blockIdx.x; index < items.last; index += gridDim.x, keys.advance()) {
    const GradientItem item = gradient_item(params, workspace, index);
    barrier_wait(shared_address(&shared.keys_full), keys.parity);
    fence_async_proxy();
    float query_score[kPairs], key_score[kPairs];  // scale q~.k~, -k~.k~
    multiply(query_score, k, q, [] {});
    blocks.scale(query_score, params.scale, shared.norms[0], shared.norms[1], false);
    multiply(key_score, k, k, [] {});
    blocks.scale(key_score, -1.f, shared.norms[0], shared.norms[0], true);
    float query_grad[kPairs] = {}, key_grad[kPairs] = {};  // beta_s Gamma R, -beta_s Gamma D, summed over the heads
    for (int i = 0; i < heads; ++i, turn.advance(), slots.next_head()) {
      auto& sums = shared.sums[turn.stage];
      const int error_slot = slots.wait(kError);
      const uint32_t error = shared_address(shared.slots[error_slot]);
      const uint32_t value_grad = shared_address(shared.slots[slots.wait(kValueGrad)]);
      const uint32_t out_grad = shared_address(shared.slots[slots.wait(kOutGrad)]);
      fence_async_proxy();
      const float* gates = shared.gates[error_slot][0];
      const float* betas = shared.gates[error_slot][1];
      float r[kPairs], d[kPairs], decay[kPairs];  // R^T, -D^T, Gamma^T
      multiply(r, error, out_grad, [&] {
        const float row_gate[2] = {gates[blocks.row[0]], gates[blocks.row[1]]};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * blocks.columns(block) + blocks.column);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float exponent = (e ? gate.y : gate.x) - (blocks.in_first_rows(block) ? row_gate[0] : row_gate[1]);
            // Left of the diagonal scores are zero, and so will be the gradients.
            if (PairBlocks::may_cross_diagonal(block)) exponent = fminf(exponent, 0.f);
            decay[2 * block + e] = decay_of(exponent);
          }
        }
      });
      slots.release(kOutGrad);
      multiply(d, error, value_grad, [] {});
      slots.release(kValueGrad);

      const float row_beta[2] = {betas[blocks.row[0]], betas[blocks.row[1]]};
      float row_sum[2] = {}, column_sum[16] = {};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const bool first = blocks.in_first_rows(block);
        const float beta = first ? row_beta[0] : row_beta[1];
        float share[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int p = 2 * block + e;
          const float weight = decay[p] * beta;
          share[e] = decay[p] * (r[p] * query_score[p] + d[p] * key_score[p]);
          query_grad[p] += weight * r[p];
          key_grad[p] += weight * d[p];
        }
        row_sum[0] += first ? share[0] + share[1] : 0.f;
        row_sum[1] += first ? 0.f : share[0] + share[1];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weighted = beta * share[e];
          if (block == 8) {
            column_sum[2 * 7 + e] += weighted;
          } else if (block >= 3) {
            column_sum[2 * block + e] += weighted;
          } else {
            column_sum[2 * block + e] += first ? weighted : 0.f;
            column_sum[2 * (6 - block) + e] += first ? 0.f : weighted;
          }
        }
      }
      column_sums(sums.gate[warp], column_sum, lane);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = quad_sum(row_sum[e]);
        if (lane % 4 == 0) sums.beta[blocks.row[e]] = sum;
      }
      const float2 gate_pair = *reinterpret_cast<const float2*>(gates + 2 * lane);
      const float2 beta_pair = *reinterpret_cast<const float2*>(betas + 2 * lane);
      const float last_gate = gates[kChunk - 1];
      slots.release(kError);
      for (int slot = kState; slot < kHeadSlots; ++slot) slots.release(slot);  // which only the others read
      if (i + 1 == heads) {
        barrier_wait(shared_address(&shared.staging_empty), keys.parity ^ 1);
        blocks.scale(query_grad, params.scale, shared.norms[0], shared.norms[1], false);
        blocks.scale(key_grad, -1.f, shared.norms[0], shared.norms[0], true);
        blocks.store(staging, query_grad, thread);
        blocks.store(staging + kTile, key_grad, thread);
        fence_async_proxy();
        barrier_arrive(staging_full);
      }
      // The pairs' sums are written; and those of the head before are read, by the warp that finished it.
      named_barrier(kPairsBarrier, kWarpgroup);
      if (warp == i % kWarps) {
        barrier_wait(shared_address(&shared.sums_full[turn.stage]), turn.parity);
        finish_gates(backward, sums, shared, {gate_pair.x, gate_pair.y}, {beta_pair.x, beta_pair.y}, last_gate, item,
                     item.key_head * heads + i, lane);
      }
    }
    barrier_arrive(shared_address(&shared.keys_empty));
  }
}

// A consumer of one half of K's columns: H, J, F and the gradients of q and k.
__device__ void consume_half(const GatedDeltaBackwardParams& backward, const Workspace& workspace, GradientItems items,
                             GradientStorage& shared, int half, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int warp = thread / 32, lane = thread % 32;
  const int heads = params.value_heads / params.key_heads;
  const uint32_t k_tile = shared_address(shared.k) + half * kTile, q_tile = shared_address(shared.q) + half * kTile;
  const uint32_t staging = shared_address(shared.staging);
  const int row[2] = {token_of(16 * warp + lane / 4), token_of(16 * warp + lane / 4 + 8)};

  SlotReader slots{shared, lane, {}};
  RingPosition<1> keys;
  RingPosition<2> turn;
  for (int index = items.first + blockIdx.x; index < items.last; index += gridDim.x, keys.advance()) {
    const GradientItem item = gradient_item(params, workspace, index);
    barrier_wait(shared_address(&shared.keys_full), keys.parity);
    fence_async_proxy();

    float q_grad[32] = {}, k_grad[32] = {};  // rq dq~ and rk dk~, [64, this half of K]
    for (int i = 0; i < heads; ++i, turn.advance(), slots.next_head()) {
      auto& sums = shared.sums[turn.stage];
      const int error_slot = slots.wait(kError);
      const uint32_t value_grad = shared_address(shared.slots[slots.wait(kValueGrad)]);
      const uint32_t out_grad = shared_address(shared.slots[slots.wait(kOutGrad)]);
      fence_async_proxy();  // the states come by the copy engine and need none
      const uint32_t state_0 = shared_address(shared.slots[slots.wait(kState)]);
      const uint32_t state_1 = shared_address(shared.slots[slots.wait(kState + 1)]);
      // H, then F, and J, then S^T dS' of one half of V: two products at a time, one in work while the other is summed.
      float even[32], odd[32];
      mma_fence();
      multiply_states(even, out_grad, state_0, state_1, half);
      mma_commit();
      multiply_states(odd, value_grad, state_0, state_1, half);
      mma_commit();
      const float* gates = shared.gates[error_slot][0];
      const float* betas = shared.gates[error_slot][1];
      const float last_gate = gates[kChunk - 1];
      float read_factor[2], predict_factor[2], write_factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float gate = gates[row[e]], decay = __expf(gate), k_norm = shared.norms[0][row[e]];
        read_factor[e] = params.scale * decay * shared.norms[1][row[e]];
        predict_factor[e] = -decay * k_norm;
        write_factor[e] = betas[row[e]] * __expf(last_gate - gate) * k_norm;
      }

      // The dots of a product's rows with those of `tile` go to `dots`; and grad += factor product.
      const auto add = [&](float(&grad)[32], float(&product)[32], uint32_t tile, float* dots, const float(&factor)[2]) {
        row_dots(dots, product, tile, thread);
#pragma unroll
        for (int p = 0; p < 32; ++p) grad[p] += factor[(p >> 1) & 1] * product[p];
      };
      mma_wait<1>();
      pin(even);
      slots.release(kOutGrad);
      add(q_grad, even, q_tile, sums.read[half], read_factor);

      const uint32_t state_grad_0 = shared_address(shared.slots[slots.wait(kStateGrad)]);
      const uint32_t state_grad_1 = shared_address(shared.slots[slots.wait(kStateGrad + 1)]);
      mma_fence();
      multiply_states(even, shared_address(shared.slots[error_slot]), state_grad_0, state_grad_1, half);
      mma_commit();
      mma_wait<1>();
      pin(odd);
      slots.release(kValueGrad);
      add(k_grad, odd, k_tile, sums.predict[half], predict_factor);
      mma_fence();
      multiply_rows(odd, half ? state_1 : state_0, half ? state_grad_1 : state_grad_0);
      mma_commit();

      mma_wait<1>();
      pin(even);
      add(k_grad, even, k_tile, sums.write[half], write_factor);
      slots.release(kError);
      mma_wait<0>();
      pin(odd);
      for (int slot = kState; slot < kHeadSlots; ++slot) slots.release(slot);
      const float trace = diagonal_sum(odd, thread);
      if (lane == 0) sums.states[half][warp] = trace;
      barrier_arrive(shared_address(&shared.sums_full[turn.stage]));
    }

    // With products that do not live across the heads: the compiler would wait for all products of a head where it
    // adds to registers that tensor cores have added to.
    const uint32_t query_pairs = staging, key_pairs = staging + kTile;  // [64 s, 64 t]
    float q_pairs[32], k_pairs[32];
    barrier_wait(shared_address(&shared.staging_full), keys.parity);
    mma_fence();
    multiply_tiles<Major::kSummedRows>(q_pairs, query_pairs, k_tile, false);
    multiply_tiles<Major::kSummedColumns>(k_pairs, query_pairs, q_tile, false);
    multiply_tiles<Major::kSummedColumns>(k_pairs, key_pairs, k_tile, true);
    multiply_tiles<Major::kSummedRows>(k_pairs, key_pairs, k_tile, true);
    mma_commit();
    mma_wait<0>();
    pin(q_pairs);
    pin(k_pairs);
#pragma unroll
    for (int p = 0; p < 32; ++p) {
      q_grad[p] += q_pairs[p];
      k_grad[p] += k_pairs[p];
    }
    uint32_t q_rows[4][4], k_rows[4][4];
    load_rows(q_rows, q_tile, thread);
    load_rows(k_rows, k_tile, thread);
    const float q_norm[2] = {shared.norms[1][row[0]], shared.norms[1][row[1]]};
    const float k_norm[2] = {shared.norms[0][row[0]], shared.norms[0][row[1]]};
    barrier_arrive(shared_address(&shared.keys_empty));

    // Through the norms: dq = rq dq~ - q~ (q~ . rq dq~), likewise dk. Then out, by way of this half's staging tile.
    row_dots(shared.projection[half][0], q_grad, q_rows, thread);
    row_dots(shared.projection[half][1], k_grad, k_rows, thread);
    named_barrier(kHalvesBarrier, kHalves * kWarpgroup);
    float q_projection[2] = {}, k_projection[2] = {};
    if (params.qk_l2norm) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = row[e];
        q_projection[e] = q_norm[e] * q_norm[e] * (shared.projection[0][0][at] + shared.projection[1][0][at]);
        k_projection[e] = k_norm[e] * k_norm[e] * (shared.projection[0][1][at] + shared.projection[1][1][at]);
      }
    }

    const auto write_out = [&](bf16* destination, int64_t stride, const float(&grad)[32], const uint32_t(&rows)[4][4],
                               const float(&projection)[2]) {
      uint32_t pairs[4][4];
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        const float2 x = unpack(rows[p / 4][p % 4]);
        pairs[p / 4][p % 4] = pack(grad[2 * p] - projection[p % 2] * x.x, grad[2 * p + 1] - projection[p % 2] * x.y);
      }
      store_rows(staging + half * kTile, pairs, thread);
      named_barrier(1 + half, kWarpgroup);
      store_tokens(destination + item.first * stride + item.key_head * kHeadDim + half * kHalf, stride, item.rows,
                   shared.staging + half * kTile, thread);
      named_barrier(1 + half, kWarpgroup);
    };
    write_out(backward.grad_q, backward.grad_q_stride, q_grad, q_rows, q_projection);
    write_out(backward.grad_k, backward.grad_k_stride, k_grad, k_rows, k_projection);
    barrier_arrive(shared_address(&shared.staging_empty));
  }
}

__global__ __launch_bounds__(kThreads, 1) void gradients(const __grid_constant__ GatedDeltaBackwardParams params,
                                                         const __grid_constant__ Workspace workspace,
                                                         GradientItems items) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<GradientStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(shared_address(&shared.slot_full[slot]), kWarpgroup + 1);
      barrier_init(shared_address(&shared.slot_empty[slot]), kConsumers * kWarps);
    }
    barrier_init(shared_address(&shared.keys_full), kWarpgroup + 1);
    barrier_init(shared_address(&shared.keys_empty), kConsumers * kWarpgroup);
    for (uint64_t& sums : shared.sums_full) barrier_init(shared_address(&sums), kHalves * kWarpgroup);
    barrier_init(shared_address(&shared.staging_full), kWarpgroup);
    barrier_init(shared_address(&shared.staging_empty), kHalves * kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  const int chunks = workspace.segment_end(params.forward.sequences) - workspace.segment_begin();
  items.last = min(items.last, chunks * params.forward.key_heads);  // of all chunks the true number is known here alone
  // The warpgroup, and a slot's index, come from one lane, so that descriptors are made in uniform registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x % kWarpgroup;
  // The CTA starts with 128 registers a thread; these add up to the same.
  if (warpgroup == kConsumers) {
    registers_decrease<32>();
    produce(params, workspace, items, shared, thread);
  } else if (warpgroup == kHalves) {
    registers_increase<176>();
    consume_pairs(params, workspace, items, shared, thread);
  } else {
    registers_increase<152>();
    consume_half(params, workspace, items, shared, warpgroup, thread);
  }
}

}  // namespace

cudaError_t launch_gradients(const GatedDeltaBackwardParams& params, const Workspace& workspace, float first,
                             float last, int multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = sizeof(GradientStorage);
  const int all = workspace.segment_chunks * params.forward.key_heads;
  const auto place = [all](float part) { return static_cast<int>(part * static_cast<float>(all)); };
  const GradientItems items{place(first), place(last)};
  const int grid = std::min(items.last - items.first, multiprocessors);
  if (grid <= 0) return cudaSuccess;
  return launch_with_shared_memory(gradients, grid, kThreads, kBytes, stream, params, workspace, items);
}

}  // namespace sluice::sm90
