// SPDX-License-Identifier: Apache-2.0
// Step 2 of sm90.cu: the last place that top-k, top-p and min-p keep.
#pragma once

#include <cfloat>

#include "sluice/kernels/draw_tokens/settings.h"
#include "sluice/kernels/draw_tokens/sm90.cuh"

namespace sluice::draw {

// The order in which the filters keep: a higher score comes first, of equal ones the lower id.
struct Order {
  uint32_t top;

  __device__ static uint32_t key_of(float score) {       // rises with the score
    const uint32_t bits = __float_as_uint(score + 0.f);  // zero has one sign
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 1u << 31);
  }
  __device__ explicit Order(float largest) : top(key_of(largest)) {}
  __device__ uint32_t distance(float score) const { return top - key_of(score); }  // rises as the score falls
  __device__ float score_at(uint32_t distance) const {
    const uint32_t key = top - distance;
    return __uint_as_float(key >> 31 != 0 ? key ^ 1u << 31 : ~key);
  }
};

// The last that stays: scores up to that distance, at that distance ids up to this one.
struct Last {
  uint32_t distance;
  uint32_t id;
  __device__ bool keeps(uint32_t other, int other_id) const {
    return other < distance || (other == distance && static_cast<uint32_t>(other_id) <= id);
  }
};
constexpr uint32_t kEveryId = ~0u, kEveryDistance = ~0u;

// Shared atomic additions are of 32 bits.
__device__ inline void add_to_bin(Shared& shared, uint32_t bin, uint64_t amount) {
  const auto low = static_cast<uint32_t>(amount);
  const uint32_t before = atomicAdd(&shared.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(amount >> 32) + (before + low < low ? 1 : 0);
  if (high != 0) atomicAdd(&shared.high[bin], high);
}

// Adds the bins of all blocks, each block some groups of them.
__device__ inline void add_bins(cg::cluster_group& cluster, Shared& shared) {
  const int warp = warp_index(), pair = warp * kGroup + 2 * lane_index();
  if (warp >= kBlockGroups) return;
  const int bin = static_cast<int>(cluster.block_rank()) * kBlockGroups * kGroup + pair;
  uint64_t first = 0, second = 0;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const auto low = *reinterpret_cast<const uint2*>(cluster.map_shared_rank(&shared.low[bin], block));
    const auto high = *reinterpret_cast<const uint2*>(cluster.map_shared_rank(&shared.high[bin], block));
    first += static_cast<uint64_t>(high.x) << 32 | low.x;
    second += static_cast<uint64_t>(high.y) << 32 | low.y;
  }
  shared.digits[pair] = first;
  shared.digits[pair + 1] = second;
  const uint64_t group = lanes_total(first + second);
  if (lane_index() == 0) shared.groups[warp] = group;
}

struct Digit {
  uint32_t value;
  uint64_t inside;  // what its bin holds
  uint64_t target;  // less what lies before
};

// Scores with a number_of(score, id) up to `most` go to the bins of their numbers' digits from bit `shift` on, with
// what they count for. The digit through which the bins' sum passes aim(the sum of all).
template <typename Places, typename NumberOf, typename Amount, typename Aim>
__device__ Digit find_digit(cg::cluster_group& cluster, Shared& shared, const Places& row, const Range& own,
                            const NumberOf& number_of, uint32_t most, int shift, const Amount& amount, const Aim& aim) {
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) shared.low[bin] = shared.high[bin] = 0;
  __syncthreads();
  row.visit_scores(own.first, own.last, [&](int batch, const float(&s)[kElements]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const uint32_t number = number_of(s[e], row.id_of(batch, e));
      if (number <= most) add_to_bin(shared, number >> shift, amount(s[e]));
    }
  });
  cluster.sync();  // all bins are full
  add_bins(cluster, shared);
  cluster.sync();  // all are added
  const int lane = lane_index();
  const uint64_t own_group = cluster.map_shared_rank(shared.groups, lane / kBlockGroups)[lane % kBlockGroups];
  const auto group = find_passing(own_group, aim(lanes_total(own_group)));
  const uint64_t* bins =
      cluster.map_shared_rank(shared.digits, group.lane / kBlockGroups) + group.lane % kBlockGroups * kGroup + 2 * lane;
  const uint64_t even = bins[0], odd = bins[1];
  const auto pair = find_passing(even + odd, group.target);
  const uint64_t first = __shfl_sync(kAllLanes, even, pair.lane), second = __shfl_sync(kAllLanes, odd, pair.lane);
  const auto value = static_cast<uint32_t>(group.lane * kGroup + 2 * pair.lane);
  return pair.target < first ? Digit{value, first, pair.target} : Digit{value + 1, second, pair.target - first};
}

// The last of the scores up to `limit` that a filter keeps: amount(score) is what a score counts for, and scores are
// kept while those before them add up to less than goal(the sum of all). With `keep_equal` all that equal the last one
// stay.
template <typename Places, typename Amount, typename Goal>
__device__ Last find_last(cg::cluster_group& cluster, Shared& shared, const Places& row, const Range& own,
                          const Order& order, uint32_t limit, const Amount& amount, const Goal& goal, bool keep_equal) {
  Digit digit{};
  uint32_t distance = 0;
#pragma unroll 1
  for (int bits = 32, shift = 21; bits > 0; bits = shift, shift = max(shift - kDigitBits, 0)) {
    const bool is_first = bits == 32;
    const auto number_of = [&](float score, int) { return order.distance(score) - distance; };
    const uint32_t most = is_first ? limit : min(limit - distance, (1u << bits) - 1);
    digit = find_digit(cluster, shared, row, own, number_of, most, shift, amount,
                       [&](uint64_t all) { return is_first ? goal(all) - 1 : digit.target; });
    distance += digit.value << shift;
  }
  // Do those before the last of the equal ones add up to less than the goal?
  if (keep_equal || digit.inside - amount(order.score_at(distance)) <= digit.target) return {distance, kEveryId};
  uint32_t id = 0;
#pragma unroll 1
  for (int bits = 32, shift = 21; bits > 0; bits = shift, shift = max(shift - kDigitBits, 0)) {
    const auto number_of = [&](float score, int own_id) {
      return order.distance(score) == distance ? static_cast<uint32_t>(own_id) - id : ~0u;
    };
    const uint32_t most = bits == 32 ? INT_MAX : (1u << bits) - 1;
    digit =
        find_digit(cluster, shared, row, own, number_of, most, shift, amount, [&](uint64_t) { return digit.target; });
    id += digit.value << shift;
  }
  return {distance, id};
}

// What top-k, top-p and min-p together keep of a row whose largest score is `top`.
template <typename Places>
__device__ Last last_kept(cg::cluster_group& cluster, Shared& shared, const Places& row, const Range& own,
                          const DrawSettings& settings, const Order& order, float top, float factor) {
  Last last{kEveryDistance, kEveryId};
  const uint32_t all = order.distance(-FLT_MAX);  // what is masked counts for nothing
  if (settings.top_k > 0 && settings.top_k < row.drawable) {
    const auto one = [](float) -> uint64_t { return 1; };
    const auto k = [&](uint64_t unmasked) { return min(static_cast<uint64_t>(settings.top_k), unmasked); };
    last = find_last(cluster, shared, row, own, order, all, one, k, /*keep_equal=*/true);
  }
  if (settings.top_p < 1) {
    // Weights as whole numbers, of which `drawable` of the largest fit in 63 bits: 45 bits at 248k ids.
    const float unit = ldexpf(1.f, 31 + __clz(row.drawable));
    const auto amount = [&](float score) -> uint64_t { return __float2ull_rz(weight(score, top, factor) * unit); };
    const auto share = [&](uint64_t total) {
      const double goal = ceil(settings.top_p * static_cast<double>(total));
      return goal < 1 ? 1 : min(static_cast<uint64_t>(goal), total);
    };
    last = find_last(cluster, shared, row, own, order, min(all, last.distance), amount, share, /*keep_equal=*/false);
  }
  if (settings.min_p > 0) {
    const float lowest = top + static_cast<float>(settings.temperature * log(settings.min_p));
    const uint32_t distance = order.distance(lowest);
    if (distance < last.distance) last = {distance, kEveryId};
  }
  return last;
}

}  // namespace sluice::draw
