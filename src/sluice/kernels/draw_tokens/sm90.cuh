// SPDX-License-Identifier: Apache-2.0
// What the steps of sm90.cu share: how a row is cut and read, and sums over lanes, warps and blocks.
#pragma once

#include <cooperative_groups.h>

#include <climits>
#include <cmath>
#include <cstdint>

#include "sluice/kernels/common/lanes.cuh"

namespace sluice::draw {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8;  // of a row: the largest cluster that fits every GPU; always as many, for equal bits
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kElements = 8;  // of a lane, loaded together: 32 bytes of float32
constexpr int kBatch = 32 * kElements;
constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;
constexpr int kGroups = 32, kGroup = kBins / kGroups;  // bins are added and looked through in groups, two a lane
constexpr int kBlockGroups = kGroups / kBlocks;
static_assert(kGroup == 64 && kBlockGroups <= kWarps && kWarps <= 32);
constexpr uint32_t kAllLanes = ~0u;
constexpr float kNever = -INFINITY;
constexpr double kLog2E = 1.4426950408889634;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / 32; }

// Of some ids: the largest score, the lowest id that has it, the sum of weight(score, top, factor).
struct Sum {
  float top;
  int id;
  double total;
};
__device__ inline Sum nothing() { return {kNever, INT_MAX, 0}; }

struct Shared {
  uint32_t low[kBins], high[kBins];        // halves of the numbers in this block's bins
  uint64_t digits[kBlockGroups * kGroup];  // of the whole row: the bins that this block adds up
  uint64_t groups[kBlockGroups];           // their sums
  Sum warp_models[kWarps], warps[kWarps];  // of untouched logits; of scores, later of those that stay
  Sum model, scores, kept;                 // of the block
  double parts[kWarps];                    // of the ids among which the token is
};

// exp((x - top) / temperature), with factor = log2(e) / temperature.
__device__ inline float weight(float x, float top, float factor) {
  return fast_exp2((x - (top == kNever ? 0.f : top)) * factor);
}

// The logits of a row, read kLanes neighbours at a time.
template <typename T, int kLanes>
struct Row {
  static constexpr int kNeighbours = kLanes;
  using Vectors = Lanes<T, kLanes>[kElements / kLanes];

  const T* logits;
  const bool* seen;  // or null
  float penalty;
  int vocabulary, drawable;

  // Of this lane's element e of a batch; ids rise with e / kLanes, then with the lane, then with e % kLanes.
  __device__ static int id_of(int batch, int e) {
    return batch + (e / kLanes * 32 + lane_index()) * kLanes + e % kLanes;
  }

  __device__ void fetch(int batch, Vectors& vectors) const {
#pragma unroll
    for (int p = 0; p < kElements / kLanes; ++p) {
      const int id = id_of(batch, p * kLanes);
      if (id < vocabulary) vectors[p] = Lanes<T, kLanes>::load(logits + id);
    }
  }

  __device__ float score_of(float z, int id) const {
    if (id >= drawable) return kNever;
    if (seen != nullptr && seen[id]) return z > 0.f ? z / penalty : z * penalty;
    return z;
  }

  __device__ void to_scores(int batch, float (&x)[kElements]) const {
    if (seen == nullptr && batch + kBatch <= drawable) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) x[e] = score_of(x[e], id_of(batch, e));
  }

  // visit(batch, logits) for the batches from first on; the next one is on its way meanwhile.
  template <typename Visit>
  __device__ void visit_logits(int first, int last, const Visit& visit) const {
    Vectors next = {};
    if (first < last) fetch(first, next);
#pragma unroll 1
    for (int batch = first; batch < last; batch += kBatch) {
      float z[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = widen(next[e / kLanes].value[e % kLanes]);
      if (batch + kBatch < last) fetch(batch + kBatch, next);
      if (batch + kBatch > vocabulary) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) z[e] = id_of(batch, e) < vocabulary ? z[e] : kNever;
      }
      visit(batch, z);
    }
  }
  template <typename Visit>
  __device__ void visit_scores(int first, int last, const Visit& visit) const {
    visit_logits(first, last, [&](int batch, float(&x)[kElements]) {
      to_scores(batch, x);
      visit(batch, x);
    });
  }
};

// Some neighbouring batches.
struct Range {
  int first, last;
  // The index-th of `count` nearly equal parts.
  __device__ Range part(int index, int count) const {
    const int batches = (last - first + kBatch - 1) / kBatch, own = (batches + count - 1) / count;
    return {first + min(index * own, batches) * kBatch, first + min((index + 1) * own, batches) * kBatch};
  }
};

// A lane's running sum.
struct LaneSum {
  float top = kNever;
  int id = INT_MAX;
  float total = 0.f;

  template <typename Place>
  __device__ void add(const float (&x)[kElements], float factor, const Place& id_of) {
    float largest = x[0];
#pragma unroll
    for (int e = 1; e < kElements; ++e) largest = fmaxf(largest, x[e]);
    if (largest > top) {
      total *= weight(top, largest, factor);
      top = largest;
#pragma unroll
      for (int e = kElements - 1; e >= 0; --e) id = x[e] == largest ? id_of(e) : id;
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) total += weight(x[e], top, factor);
  }

  __device__ void add(const LaneSum& other, float factor) {
    const float larger = fmaxf(top, other.top);
    total = total * weight(top, larger, factor) + other.total * weight(other.top, larger, factor);
    top = larger;
  }
};

template <typename Number>
__device__ Number lanes_total(Number x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

// Of all lanes' ids.
__device__ inline Sum join_lanes(const Sum& own, float factor) {
  Sum all = own;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float top = __shfl_xor_sync(kAllLanes, all.top, mask);
    const int id = __shfl_xor_sync(kAllLanes, all.id, mask);
    if (top > all.top || (top == all.top && id < all.id)) all.top = top, all.id = id;
  }
  all.total = lanes_total(own.total * weight(own.top, all.top, factor));
  return all;
}
__device__ inline Sum join_lanes(const LaneSum& own, float factor) {
  return join_lanes(Sum{own.top, own.id, own.total}, factor);
}

// Of the block, from what each warp left; one warp writes it.
__device__ inline void join_warps(const Sum (&warps)[kWarps], float factor, Sum& block) {
  const Sum all = join_lanes(lane_index() < kWarps ? warps[lane_index()] : nothing(), factor);
  if (lane_index() == 0) block = all;
}

// Of the row, from what each block left.
__device__ inline Sum join_blocks(cg::cluster_group& cluster, Sum& block, float factor) {
  return join_lanes(lane_index() < kBlocks ? *cluster.map_shared_rank(&block, lane_index()) : nothing(), factor);
}

// Which lane's numbers, added in the order of lanes, pass `target`, and the target less what lies before. Where
// rounding lets none pass, the last one above zero.
template <typename Number>
struct Passing {
  int lane;
  Number target;
};
template <typename Number>
__device__ Passing<Number> find_passing(Number own, Number target) {
  Number through = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Number before = __shfl_up_sync(kAllLanes, through, step);
    if (lane_index() >= step) through += before;
  }
  const uint32_t passing = __ballot_sync(kAllLanes, own > 0 && target < through);
  const uint32_t some = __ballot_sync(kAllLanes, own > 0);
  const int lane = passing != 0 ? __ffs(passing) - 1 : max(31 - __clz(some), 0);
  return {lane, target - __shfl_sync(kAllLanes, through - own, lane)};
}

}  // namespace sluice::draw
