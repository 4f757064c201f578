// SPDX-License-Identifier: Apache-2.0
// A cluster of eight blocks draws a row's token. Each warp owns a run of neighbouring ids, and the warps of a cluster
// together all of them.
//   1. One pass over the logits leaves each warp's largest score and the sum of its weights, and the same of the
//      untouched logits. The blocks read each other's through distributed shared memory, so that all know the row's.
//   2. With top-k or top-p: the last place that a filter keeps, in the order of falling scores, is found digit by
//      digit. A pass adds what each score counts for (one, or its weight) to its digit's bin in shared memory; the
//      digit in which the sum passes the goal is the place's. Bins hold whole numbers, whose sums have no order. Three
//      passes find the score, and where only some of several equal ones stay, three more the last id.
//      With any filter: a pass adds the weights of what stays, as in 1.
//   3. From the sums: the block, and in it the warp, in whose ids the random number falls. That block looks at them
//      again.
// Without filters the logits are read once: 4 bytes an id, or 2. Later passes find in L2 what fits there of the rows
// that run together. The order of a sum depends on V alone.
#include <cfloat>
#include <utility>

#include "sluice/kernels/common/vector_launch.cuh"
#include "sluice/kernels/draw_tokens/params.h"
#include "sluice/kernels/draw_tokens/sm90.cuh"
#include "sluice/kernels/draw_tokens/sm90_filters.cuh"

namespace sluice {
namespace draw {
namespace {

struct Kept {
  Order order;
  Last last;
  float top, factor;
  bool all;

  __device__ float weight_of(float score, int id) const {
    return all || last.keeps(order.distance(score), id) ? weight(score, top, factor) : 0.f;
  }
};

// Largest and sum of the warp's scores and of its untouched logits.
template <typename Places>
__device__ void sum_warp(const Places& row, const Range& own, float factor, Sum& warp_scores, Sum& warp_model) {
  constexpr auto kModelFactor = static_cast<float>(kLog2E);
  const bool alike = factor == kModelFactor && row.seen == nullptr;  // a score's weight is then its logit's
  LaneSum scores, model;
  row.visit_logits(own.first, own.last, [&](int batch, float(&x)[kElements]) {
    const auto id_of = [batch](int e) { return Places::id_of(batch, e); };
    if (!alike || batch + kBatch > row.drawable) {
      float z[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = alike && id_of(e) < row.drawable ? kNever : x[e];
      model.add(z, kModelFactor, id_of);
    }
    row.to_scores(batch, x);
    scores.add(x, factor, id_of);
  });
  if (alike) model.add(scores, kModelFactor);
  const Sum all_scores = join_lanes(scores, factor), all_model = join_lanes(model, kModelFactor);
  if (lane_index() == 0) warp_scores = all_scores, warp_model = all_model;
}

// The sum of the weights, of all lanes.
template <typename Places>
__device__ double sum_kept(const Places& row, const Range& own, const Kept& kept) {
  float total = 0.f;
  row.visit_scores(own.first, own.last, [&](int batch, const float(&s)[kElements]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) total += kept.weight_of(s[e], row.id_of(batch, e));
  });
  return lanes_total<double>(total);
}

// The id of one batch through which the weights pass `target`.
template <typename Places>
__device__ int find_id(const Places& row, int batch, const Kept& kept, double target) {
  constexpr int kLanes = Places::kNeighbours, kPieces = kElements / kLanes;
  float w[kElements];
  double own[kPieces] = {};
  row.visit_scores(batch, batch + kBatch, [&](int, const float(&s)[kElements]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      w[e] = kept.weight_of(s[e], row.id_of(batch, e));
      own[e / kLanes] += w[e];
    }
  });
  int piece = 0;
  double through = 0, before = 0;
  bool some = false;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const double total = lanes_total(own[p]);
    if (total > 0 && (!some || through <= target)) piece = p, before = through, some = true;
    through += total;
  }
  double chosen = 0;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) chosen = p == piece ? own[p] : chosen;
  const auto found = find_passing(chosen, target - before);
  int id = -1;
  through = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    if (e / kLanes != piece) continue;
    if (w[e] > 0.f && (id < 0 || through <= found.target)) id = row.id_of(batch, e);
    through += w[e];
  }
  return __shfl_sync(kAllLanes, id, found.lane);
}

template <typename T, int kLanes>
__global__ __cluster_dims__(kBlocks)
    __launch_bounds__(kThreads, 4) void draw_row(const __grid_constant__ DrawTokensParams params) {
  __shared__ Shared shared;
  auto cluster = cg::this_cluster();
  const int64_t index = blockIdx.x / kBlocks;
  const int rank = static_cast<int>(cluster.block_rank()), warp = warp_index(), lane = lane_index();
  const DrawSettings& settings = params.settings[index];
  const bool is_penalized = params.seen != nullptr && settings.repetition_penalty != 1;
  const Row<T, kLanes> row{.logits = static_cast<const T*>(params.logits) + index * params.row_stride,
                           .seen = is_penalized ? params.seen + index * params.drawable : nullptr,
                           .penalty = static_cast<float>(settings.repetition_penalty),
                           .vocabulary = params.vocabulary,
                           .drawable = params.drawable};
  const Range whole{0, params.vocabulary};
  const Range own = whole.part(rank * kWarps + warp, kBlocks * kWarps);
  const bool is_greedy = settings.temperature == 0;
  const double exact_factor = is_greedy ? kLog2E : kLog2E / settings.temperature;
  const auto factor = static_cast<float>(fmin(fmax(exact_factor, double{FLT_MIN}), double{FLT_MAX}));

  // 1. Of the whole row
  sum_warp(row, own, factor, shared.warps[warp], shared.warp_models[warp]);
  __syncthreads();
  if (warp == 0) join_warps(shared.warp_models, kLog2E, shared.model);
  if (warp == 1) join_warps(shared.warps, factor, shared.scores);
  cluster.sync();
  const Sum model = join_blocks(cluster, shared.model, kLog2E), scores = join_blocks(cluster, shared.scores, factor);
  const double log_sum = model.top + log(model.total);
  const bool is_sound = isfinite(log_sum) && isfinite(scores.top);
  if (!is_sound || is_greedy) {
    auto arrival = cluster.barrier_arrive();
    if (rank == 0 && threadIdx.x == 0) {
      const double logprob = is_sound ? widen(row.logits[scores.id]) - log_sum : NAN;
      params.drawn[index] = {is_sound ? static_cast<double>(scores.id) : 0., logprob, logprob};
    }
    cluster.barrier_wait(std::move(arrival));  // no block leaves while another reads its shared memory
    return;
  }

  // 2. What stays
  const Order order(scores.top);
  const Last last = last_kept(cluster, shared, row, own, settings, order, scores.top, factor);
  const Kept kept{order, last, scores.top, factor, last.distance == kEveryDistance};
  Sum* block = &shared.scores;
  if (!kept.all) {
    block = &shared.kept;
    const double total = sum_kept(row, own, kept);
    if (lane == 0) shared.warps[warp] = {scores.top, 0, total};
    __syncthreads();
    if (warp == 0) join_warps(shared.warps, factor, shared.kept);
    cluster.sync();
  }

  // 3. The block, the warp and the id
  const auto share = [&](const Sum& sum) { return sum.total * weight(sum.top, scores.top, factor); };
  const double of_block = lane < kBlocks ? share(*cluster.map_shared_rank(block, lane)) : 0;
  auto arrival = cluster.barrier_arrive();
  const double total = lanes_total(of_block);
  const auto in_block = find_passing(of_block, settings.random * total);
  if (in_block.lane == rank) {
    auto found = find_passing(lane < kWarps ? share(shared.warps[lane]) : 0., in_block.target);
    Range range = whole.part(rank * kWarps + found.lane, kBlocks * kWarps);
    while (range.last - range.first > kBatch) {
      const double part = sum_kept(row, range.part(warp, kWarps), kept);
      if (lane == 0) shared.parts[warp] = part;
      __syncthreads();
      found = find_passing(lane < kWarps ? shared.parts[lane] : 0., found.target);
      range = range.part(found.lane, kWarps);
      __syncthreads();
    }
    if (warp == 0) {
      const int id = find_id(row, range.first, kept, found.target);
      const float z = widen(row.logits[id]);
      const double below = static_cast<double>(row.score_of(z, id)) - scores.top;
      if (lane == 0) {
        params.drawn[index] = {static_cast<double>(id), below / settings.temperature - log(total), z - log_sum};
      }
    }
  }
  cluster.barrier_wait(std::move(arrival));  // as above
}

}  // namespace
}  // namespace draw

cudaError_t launch_draw_tokens(const DrawTokensParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  return launch_in_vectors(
      params.bfloat16, params.vocabulary, {params.logits}, {params.row_stride}, [&]<typename T, int kLanes>() {
        draw::draw_row<T, kLanes><<<params.rows * draw::kBlocks, draw::kThreads, 0, stream>>>(params);
      });
}

}  // namespace sluice
