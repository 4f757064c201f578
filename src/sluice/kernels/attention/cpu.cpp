// SPDX-License-Identifier: Apache-2.0
// CPU forward path: online softmax over tiles (Dao et al. 2022, "FlashAttention"). A task is one sequence, one kv head
// and a block of its queries; the query heads of the kv head become rows of the same products:
//   S = Q K^T for a tile of keys    m' = max(m, rowmax S)    P = exp(S - m')
//   O <- O exp(m - m') + P V        l <- l exp(m - m') + rowsum P
// and O / l at the end. Sequences of few queries (decoding) have no tile worth a product: they run dot products
// straight over the cache, long caches in splits that are merged by the same formula. Tiles and splits begin at the
// sequence's first key, so that a sequence gives the same bits in every pack.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/attention/sequences.h"
#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/matmul.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kRows = 256;       // of a task's products: tokens times heads; its scores are then 256 KiB
constexpr std::int64_t kKeys = 256;       // of a tile
constexpr std::int64_t kDirect = 16;      // rows up to which dot products beat tiles
constexpr std::int64_t kSplit = 1024;     // keys of one split
constexpr std::int64_t kDirectKeys = 64;  // scored at once: their probabilities stay in registers and first cache

template <typename Scalar>
struct Forward {
  const Scalar *q, *k, *v;  // dense
  Scalar* out;
  Wide<Scalar>* lse;
  std::int64_t heads, kv_heads, group, key_dim, value_dim;
  Wide<Scalar> scale;
  std::int64_t key_stride() const { return kv_heads * key_dim; }
  std::int64_t value_stride() const { return kv_heads * value_dim; }
  // The rows of kv head h at a token, `group` of them, are neighbours.
  std::int64_t row(std::int64_t token, std::int64_t kv_head) const { return token * heads + kv_head * group; }
  const Scalar* key(std::int64_t row, std::int64_t kv_head) const { return k + (row * kv_heads + kv_head) * key_dim; }
  const Scalar* value(std::int64_t row, std::int64_t kv_head) const {
    return v + (row * kv_heads + kv_head) * value_dim;
  }
};

// Softmax of one row so far.
template <typename Real>
struct Running {
  Real max = -std::numeric_limits<Real>::infinity(), sum = 0;
};

// Takes `count` more scores into a row: they become exp(score - max), and what was summed before must be multiplied by
// the returned factor. A NaN score makes the sum NaN.
template <typename Real>
SLUICE_INLINE Real take_scores(Real* scores, std::int64_t count, Running<Real>& running) {
  const Real max = std::max(running.max, lane_max(scores, count));
  const Real factor = exp_nonpositive(running.max - max);
  for (std::int64_t j = 0; j < count; ++j) scores[j] = exp_nonpositive(scores[j] - max);
  running.max = max;
  running.sum = running.sum * factor + lane_sum<Real>(count, [scores](std::int64_t j) { return scores[j]; });
  return factor;
}

template <typename Scalar>
SLUICE_INLINE void finish_row(const Wide<Scalar>* acc, Running<Wide<Scalar>> running, std::int64_t width, Scalar* out,
                              Wide<Scalar>& lse) {
  const auto inverse = running.sum == 0 ? 0 : 1 / running.sum;  // 0: no key was visible
  for (std::int64_t c = 0; c < width; ++c) out[c] = narrow<Scalar>(acc[c] * inverse);
  lse = running.max + std::log(running.sum);
}

// ---- Tiles

// One tile's scores [rows, stride] become probabilities; row r sees the first visible(r / group) of `keys` keys. acc
// [rows, value_dim] is rescaled to the new maximum.
template <typename Scalar>
SLUICE_MULTIARCH void softmax_tile(Wide<Scalar>* scores, Scalar* probabilities, Wide<Scalar>* acc,
                                   Running<Wide<Scalar>>* running, std::int64_t rows, std::int64_t stride,
                                   std::int64_t keys, std::int64_t visible_to_first, std::int64_t group,
                                   std::int64_t value_dim, Wide<Scalar> scale) {
  for (std::int64_t r = 0; r < rows; ++r) {
    auto* row = scores + r * stride;
    const auto visible = std::clamp<std::int64_t>(visible_to_first + r / group, 0, keys);
    if (visible > 0) {
      for (std::int64_t j = 0; j < visible; ++j) row[j] *= scale;
      const auto factor = take_scores(row, visible, running[r]);
      if (factor != 1) {
        for (std::int64_t c = 0; c < value_dim; ++c) acc[r * value_dim + c] *= factor;
      }
    }
    for (std::int64_t j = 0; j < visible; ++j) probabilities[r * stride + j] = narrow<Scalar>(row[j]);
    std::fill_n(probabilities + r * stride + visible, keys - visible, Scalar(0));
  }
}

struct Block {
  std::int64_t sequence, kv_head, first_query, queries;
};

// A dense matrix inside a cache: rows [first, first + count) of one kv head.
template <typename Scalar>
Tensor cache_tile(const Scalar* first, std::int64_t count, std::int64_t width, std::int64_t stride,
                  at::ScalarType type) {
  return at::from_blob(const_cast<Scalar*>(first), {count, width}, {stride, 1}, at::TensorOptions().dtype(type));
}

template <typename Scalar>
SLUICE_MULTIARCH void finish_block(const Forward<Scalar>& f, const KeyedSequence& s, const Block& b,
                                   const Wide<Scalar>* acc, const Running<Wide<Scalar>>* running) {
  for (std::int64_t r = 0; r < b.queries * f.group; ++r) {
    const auto row = f.row(s.q_begin + b.first_query + r / f.group, b.kv_head) + r % f.group;
    finish_row(acc + r * f.value_dim, running[r], f.value_dim, f.out + row * f.value_dim, f.lse[row]);
  }
}

template <typename Scalar>
void attend_block(const Forward<Scalar>& f, const KeyedSequence& s, const Block& b) {
  constexpr auto type = c10::CppTypeToScalarType<Scalar>::value, wide = c10::CppTypeToScalarType<Wide<Scalar>>::value;
  const auto rows = b.queries * f.group;
  const Tensor q = at::empty({rows, f.key_dim}, at::TensorOptions().dtype(type));
  for (std::int64_t i = 0; i < b.queries; ++i) {
    std::copy_n(f.q + f.row(s.q_begin + b.first_query + i, b.kv_head) * f.key_dim, f.group * f.key_dim,
                q.mutable_data_ptr<Scalar>() + i * f.group * f.key_dim);
  }
  const Tensor scores = at::empty({rows, kKeys}, q.options().dtype(wide));
  const Tensor probabilities = type == wide ? scores : at::empty({rows, kKeys}, q.options());
  const Tensor acc = at::zeros({rows, f.value_dim}, scores.options());
  std::vector<Running<Wide<Scalar>>> running(rows);
  const auto visible = s.visible(b.first_query + b.queries - 1);
  for (std::int64_t begin = 0; begin < visible; begin += kKeys) {
    const auto keys = std::min(kKeys, visible - begin);
    const auto k = cache_tile(f.key(s.k_begin + begin, b.kv_head), keys, f.key_dim, f.key_stride(), type);
    const auto v = cache_tile(f.value(s.k_begin + begin, b.kv_head), keys, f.value_dim, f.value_stride(), type);
    matmul_into(scores.narrow(1, 0, keys), q, k.t(), false);
    softmax_tile(scores.mutable_data_ptr<Wide<Scalar>>(), probabilities.mutable_data_ptr<Scalar>(),
                 acc.mutable_data_ptr<Wide<Scalar>>(), running.data(), rows, kKeys, keys,
                 s.k_count - s.q_count + b.first_query + 1 - begin, f.group, f.value_dim, f.scale);
    matmul_into(acc, probabilities.narrow(1, 0, keys), v, true);
  }
  finish_block(f, s, b, acc.const_data_ptr<Wide<Scalar>>(), running.data());
}

// ---- Few queries

// Rows of one sequence and kv head over the keys of one split; acc [rows, value_dim].
template <typename Scalar>
SLUICE_MULTIARCH void attend_split(const Forward<Scalar>& f, const KeyedSequence& s, std::int64_t kv_head,
                                   std::int64_t split, Wide<Scalar>* __restrict acc, Running<Wide<Scalar>>* running) {
  using Real = Wide<Scalar>;
  constexpr std::int64_t kTogether = 4;  // keys added to acc in one pass over it
  const auto end = std::min(s.k_count, (split + 1) * kSplit);
  for (std::int64_t begin = split * kSplit; begin < end; begin += kDirectKeys) {
    const auto *keys = f.key(s.k_begin + begin, kv_head), *values = f.value(s.k_begin + begin, kv_head);
    for (std::int64_t r = 0; r < s.q_count * f.group; ++r) {
      const auto visible = std::min({s.visible(r / f.group) - begin, end - begin, kDirectKeys});
      if (visible <= 0) continue;
      const auto* q = f.q + (f.row(s.q_begin + r / f.group, kv_head) + r % f.group) * f.key_dim;
      Real p[kDirectKeys];
      for (std::int64_t j = 0; j < visible; ++j) {
        const auto* key = keys + j * f.key_stride();
        p[j] = f.scale * lane_sum<Real>(f.key_dim, [q, key](std::int64_t i) { return widen(q[i]) * widen(key[i]); });
      }
      const Real factor = take_scores(p, visible, running[r]);
      Real* __restrict sum = acc + r * f.value_dim;
      for (std::int64_t c = 0; c < f.value_dim; ++c) sum[c] *= factor;
      std::int64_t j = 0;
      for (; j + kTogether <= visible; j += kTogether) {
        const auto *v0 = values + j * f.value_stride(), *v1 = v0 + f.value_stride(), *v2 = v1 + f.value_stride(),
                   *v3 = v2 + f.value_stride();
        for (std::int64_t c = 0; c < f.value_dim; ++c) {
          sum[c] +=
              (p[j] * widen(v0[c]) + p[j + 1] * widen(v1[c])) + (p[j + 2] * widen(v2[c]) + p[j + 3] * widen(v3[c]));
        }
      }
      for (; j < visible; ++j) {
        const auto* value = values + j * f.value_stride();
        for (std::int64_t c = 0; c < f.value_dim; ++c) sum[c] += p[j] * widen(value[c]);
      }
    }
  }
}

// Adds one split's softmax into another.
template <typename Real>
SLUICE_MULTIARCH void merge_split(Real* __restrict acc, Running<Real>& running, const Real* __restrict other_acc,
                                  const Running<Real>& other, std::int64_t width) {
  if (other.sum == 0) return;
  const Real max = std::max(running.max, other.max);
  const Real factor = exp_nonpositive(running.max - max), other_factor = exp_nonpositive(other.max - max);
  for (std::int64_t c = 0; c < width; ++c) acc[c] = acc[c] * factor + other_acc[c] * other_factor;
  running = {.max = max, .sum = running.sum * factor + other.sum * other_factor};
}

struct Split {
  std::int64_t sequence, kv_head, index, room;  // room: first row of acc and running
};

template <typename Scalar>
void attend_direct(const Forward<Scalar>& f, const std::vector<KeyedSequence>& sequences,
                   const std::vector<std::int64_t>& chosen) {
  using Real = Wide<Scalar>;
  std::vector<Split> splits;
  std::int64_t rows = 0, work = 0;
  for (const auto n : chosen) {
    const auto& s = sequences[n];
    for (std::int64_t h = 0; h < f.kv_heads; ++h) {
      for (std::int64_t i = 0; i == 0 || i * kSplit < s.k_count; ++i, rows += s.q_count * f.group) {
        splits.push_back({.sequence = n, .kv_head = h, .index = i, .room = rows});
      }
    }
    work += s.q_count * f.heads * s.k_count * (f.key_dim + f.value_dim);
  }
  std::vector<Real> acc(rows * f.value_dim);
  std::vector<Running<Real>> running(rows);
  const auto count = static_cast<std::int64_t>(splits.size());
  constexpr std::int64_t kWorthAThread = 1 << 17;  // multiply-adds, about 10 microseconds
  const auto grain = std::max<std::int64_t>(1, count * kWorthAThread / std::max<std::int64_t>(work, 1));
  at::parallel_for(0, count, grain, [&](std::int64_t first, std::int64_t last) {
    for (auto i = first; i < last; ++i) {
      const auto& [n, h, index, room] = splits[i];
      attend_split(f, sequences[n], h, index, acc.data() + room * f.value_dim, running.data() + room);
    }
  });
  for (std::int64_t i = 0; i < count;) {
    const auto& [n, h, index, room] = splits[i];
    const auto own = sequences[n].q_count * f.group;
    for (++i; i < count && splits[i].index > 0; ++i) {
      for (std::int64_t r = 0; r < own; ++r) {
        const auto other = splits[i].room + r;
        merge_split(acc.data() + (room + r) * f.value_dim, running[room + r], acc.data() + other * f.value_dim,
                    running[other], f.value_dim);
      }
    }
    finish_block(f, sequences[n], {.sequence = n, .kv_head = h, .first_query = 0, .queries = sequences[n].q_count},
                 acc.data() + room * f.value_dim, running.data() + room);
  }
}

// ----

template <typename Scalar>
void attend_tiled(const Forward<Scalar>& f, const std::vector<KeyedSequence>& sequences,
                  const std::vector<std::int64_t>& chosen) {
  std::vector<Block> blocks;
  const auto queries = std::max<std::int64_t>(1, kRows / f.group);
  for (const auto n : chosen) {
    for (std::int64_t first = 0; first < sequences[n].q_count; first += queries) {
      for (std::int64_t h = 0; h < f.kv_heads; ++h) {
        blocks.push_back({n, h, first, std::min(queries, sequences[n].q_count - first)});
      }
    }
  }
  // Dearest first, to whichever thread is free: causal blocks differ by the length of their past.
  const auto cost = [&](const Block& b) { return sequences[b.sequence].visible(b.first_query) * b.queries; };
  std::ranges::stable_sort(blocks, [&](const Block& a, const Block& b) { return cost(a) > cost(b); });
  std::atomic<std::size_t> next = 0;
  const auto run = [&](std::int64_t, std::int64_t) {
    const at::AutoDispatchBelowAutograd below;
    for (auto i = next++; i < blocks.size(); i = next++) attend_block(f, sequences[blocks[i].sequence], blocks[i]);
  };
  at::parallel_for(0, std::min<std::int64_t>(at::get_num_threads(), blocks.size()), 1, run);
}

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                       const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
                                       std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double scale) {
  const auto sequences = checked_sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k);
  const auto dense_q = q.contiguous(), dense_k = k.contiguous(), dense_v = v.contiguous();
  const auto group = q.size(1) / k.size(1);
  auto out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(wide_type(q.scalar_type())));
  std::vector<std::int64_t> few, many;
  for (std::int64_t n = 0; n < static_cast<std::int64_t>(sequences.size()); ++n) {
    const auto queries = sequences[n].q_count;
    if (queries > 0) (queries == 1 || queries * group <= kDirect ? few : many).push_back(n);
  }
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, q.scalar_type(), "attention", [&] {
    const Forward<scalar_t> f{.q = dense_q.const_data_ptr<scalar_t>(),
                              .k = dense_k.const_data_ptr<scalar_t>(),
                              .v = dense_v.const_data_ptr<scalar_t>(),
                              .out = out.mutable_data_ptr<scalar_t>(),
                              .lse = lse.mutable_data_ptr<Wide<scalar_t>>(),
                              .heads = q.size(1),
                              .kv_heads = k.size(1),
                              .group = group,
                              .key_dim = q.size(2),
                              .value_dim = v.size(2),
                              .scale = static_cast<Wide<scalar_t>>(scale)};
    attend_direct(f, sequences, few);
    attend_tiled(f, sequences, many);
  });
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) { m.impl("attention", forward_cpu); }

}  // namespace sluice
