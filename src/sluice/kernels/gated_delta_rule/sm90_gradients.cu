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
    copy_token_tile<kWarpgroup>(shared_address(shared.k) + half * kTile, k + half * kHalf, params.k_stride, item.rows,
                                thread);
    copy_token_tile<kWarpgroup>(shared_address(shared.q) + half * kTile, q + half * kHalf, params.q_stride, item.rows,
                                thread);
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

// The consumer of R.
__device__ void consume_pairs(const GatedDeltaBackwardParams& backward, const Workspace& workspace, GradientItems items,
                              GradientStorage& shared, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int warp = thread / 32, lane = thread % 32;
  const int heads = params.value_heads / params.key_heads;

  SlotReader slots{shared, lane, {}};
  RingPosition<1> keys;
  int turn = 0;
  for (int index = items.first + blockIdx.x; index < items.last; index += gridDim.x, keys.advance()) {
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
__device__ void consume_half(const GatedDeltaBackwardParams& backward, const Workspace& workspace, GradientItems items,
                             GradientStorage& shared, int half, int thread) {
  const GatedDeltaParams& params = backward.forward;
  const int warp = thread / 32, lane = thread % 32;
  const int heads = params.value_heads / params.key_heads;
  const uint32_t k_tile = shared_address(shared.k) + half * kTile, q_tile = shared_address(shared.q) + half * kTile;
  const uint32_t staging = shared_address(shared.staging);
  const int row = 16 * warp + lane / 4;

  SlotReader slots{shared, lane, {}};
  RingPosition<1> keys;
  int turn = 0;
  for (int index = items.first + blockIdx.x; index < items.last; index += gridDim.x, keys.advance()) {
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
      const int out_grad_slot = slots.wait(kOutGrad);
      fence_async_proxy();  // the states come by the copy engine and need none
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
      const int state_slots[2] = {slots.wait(kState), slots.wait(kState + 1)};

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
      store_token_tile<kWarpgroup>(destination + item.first * stride + item.key_head * kHeadDim + half * kHalf, stride,
                                   item.rows, shared.staging + half * kTile, thread);
      named_barrier(1 + half, kWarpgroup);
    };
    write_out(backward.grad_q, backward.grad_q_stride, q_grad, q_rows, q_projection);
    write_out(backward.grad_k, backward.grad_k_stride, k_grad, k_rows, k_projection);
    // With more value heads, the sums' barrier of the next item keeps its gradients of the scores out of staging until
    // here.
    if (heads == 1) named_barrier(kConsumerBarrier, kConsumers * kWarpgroup);
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
      barrier_init(shared_address(&shared.slot_empty[slot]), kConsumers * kWarpgroup);
    }
    barrier_init(shared_address(&shared.keys_full), kWarpgroup + 1);
    barrier_init(shared_address(&shared.keys_empty), kConsumers * kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  const int chunks = workspace.segment_end(params.forward.sequences) - workspace.segment_begin();
  items.last = min(items.last, chunks * params.forward.key_heads);  // of all chunks the true number is known here alone
  // The warpgroup, and a slot's index, come from one lane, so that descriptors are made in uniform registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x % kWarpgroup;
  // The CTA starts with 128 registers a thread; these add up to the same.
  if (warpgroup == kConsumers) {
    registers_decrease<40>();
    produce(params, workspace, items, shared, thread);
  } else if (warpgroup == kHalves) {
    registers_decrease<120>();
    consume_pairs(params, workspace, items, shared, thread);
  } else {
    registers_increase<176>();
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
