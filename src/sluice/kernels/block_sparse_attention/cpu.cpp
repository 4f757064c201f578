// SPDX-License-Identifier: Apache-2.0
// CPU path. Forward and the gradient of q run over query tokens, each alone: the rows of its chosen keys are gathered a
// panel at a time, in the wide type, and meet all query heads of their kv head there. The gradients of k and v run over
// stripes of keys: a task owns the rows of one stripe and kv head, and walks the queries that attend into it. With
// D_i = dO_i . O_i:
//   P = exp(scale q . k - lse)    dS = scale P (dO . v - D)    dq += dS k    dk += dS q    dv += P dO
// Both walks compute P and dS again rather than store them, so memory stays linear, and no two tasks write one row.
// Sums run over keys, or over queries, in rising order.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/choice.h"
#include "sluice/kernels/block_sparse_attention/products.h"
#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kStripe = 256;  // keys of a task of the second walk: 1 MiB with their gradients at 256 dims
constexpr std::int64_t kPanel = 64;    // keys at once: 64 KiB at 256 dims, which the second-level cache keeps

// Query heads of one kv head, as many as a vector has lanes.
struct Heads {
  std::int64_t kv_head, first, count;
};

template <typename Scalar>
struct Inputs {
  using Real = Wide<Scalar>;
  Tensor q_, k_, v_;  // dense
  const Scalar *q, *k, *v;
  std::int64_t heads, kv_heads, key_dim, value_dim;
  Real scale;

  Inputs(const Tensor& queries, const Tensor& keys, const Tensor& values, double score_scale)
      : q_(queries.contiguous()),
        k_(keys.contiguous()),
        v_(values.contiguous()),
        q(q_.const_data_ptr<Scalar>()),
        k(k_.const_data_ptr<Scalar>()),
        v(v_.const_data_ptr<Scalar>()),
        heads(q_.size(1)),
        kv_heads(k_.size(1)),
        key_dim(k_.size(2)),
        value_dim(v_.size(2)),
        scale(static_cast<Real>(score_scale)) {}

  template <typename Body>
  void for_heads_of(std::int64_t kv_head, const Body& body) const {
    const auto group = heads / kv_heads;
    for (std::int64_t first = 0; first < group; first += kLanes<Real>) {
      body(Heads{kv_head, kv_head * group + first, std::min(kLanes<Real>, group - first)});
    }
  }
  std::int64_t row(std::int64_t token, const Heads& h) const { return token * heads + h.first; }
};

// Rows in the wide type, padded, with a pointer to each.
template <typename Real>
class Panel {
 public:
  // Rows row_of[i] of `from`.
  template <typename Scalar>
  void gather(const Scalar* from, std::int64_t stride, std::span<const std::int64_t> row_of, std::int64_t width) {
    lay_out(std::ssize(row_of), width);
    widen_rows(from, stride, row_of.data(), std::ssize(row_of), width, values_.data());
  }
  void zero(std::int64_t count, std::int64_t width) {
    lay_out(count, width);
    std::fill(values_.begin(), values_.end(), 0);
  }
  const Real* const* rows() const { return rows_.data(); }
  Real* const* rows() { return rows_.data(); }

 private:
  void lay_out(std::int64_t count, std::int64_t width) {
    values_.resize(count * padded<Real>(width));
    rows_.resize(count);
    for (std::int64_t i = 0; i < count; ++i) rows_[i] = values_.data() + i * padded<Real>(width);
  }
  std::vector<Real> values_;
  std::vector<Real*> rows_;
};

template <typename Real>
using PerLane = std::array<Real, kLanes<Real>>;

template <typename Real>
PerLane<Real> to_lanes(const Real* x, std::int64_t count) {
  PerLane<Real> lanes{};
  std::copy_n(x, count, lanes.begin());
  return lanes;
}

// Room of one task, kept over its queries.
template <typename Real>
struct Room {
  std::vector<std::int64_t> chosen;  // rows of k and v
  std::vector<Real> q, grad_out;     // lanes
  std::vector<Real> p, grad_scores;  // [chosen, kLanes]
  Panel<Real> keys, values, sums;
};

template <typename Scalar>
SLUICE_MULTIARCH void store(const Wide<Scalar>* from, std::int64_t count, Wide<Scalar> factor, Scalar* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = narrow<Scalar>(from[i] * factor);
}

// The rows of k and v that query i attends to.
void choose(const KeyedSequence& s, std::int64_t i, const Choice& choice, std::vector<std::int64_t>& chosen) {
  chosen.clear();
  choice.for_each_run(s, i, 0, s.k_count, [&](std::int64_t begin, std::int64_t end) {
    for (auto j = begin; j < end; ++j) chosen.push_back(s.k_begin + j);
  });
}

// body(first, rows) for each panel of the chosen rows.
template <typename Body>
void for_each_panel(std::span<const std::int64_t> chosen, const Body& body) {
  for (std::int64_t first = 0; first < std::ssize(chosen); first += kPanel) {
    body(first, chosen.subspan(first, std::min(kPanel, std::ssize(chosen) - first)));
  }
}

// ---- Forward

// Products [keys, kLanes] become probabilities that are not yet divided by their sum, which is added up by panels.
template <typename Real>
SLUICE_MULTIARCH void exponentiate(Real* x, std::int64_t keys, Real scale, PerLane<Real>& max, PerLane<Real>& sum) {
  constexpr auto lanes = kLanes<Real>;
  max.fill(-std::numeric_limits<Real>::infinity());
  sum.fill(0);
  for (std::int64_t j = 0; j < keys; ++j) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      auto& score = x[j * lanes + lane];
      score *= scale;
      max[lane] = score > max[lane] ? score : max[lane];  // a NaN is passed over
    }
  }
  for (std::int64_t first = 0; first < keys; first += kPanel) {
    Real part[lanes] = {};
    for (auto j = first; j < std::min(keys, first + kPanel); ++j) {
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        part[lane] += x[j * lanes + lane] = exp_nonpositive(x[j * lanes + lane] - max[lane]);
      }
    }
    for (std::int64_t lane = 0; lane < lanes; ++lane) sum[lane] += part[lane];
  }
}

template <typename Scalar>
void attend_token(const Inputs<Scalar>& in, const KeyedSequence& s, std::int64_t i, const Choice& choice,
                  Room<Wide<Scalar>>& room, Scalar* out, Wide<Scalar>* lse) {
  using Real = Wide<Scalar>;
  constexpr auto lanes = kLanes<Real>;
  choose(s, i, choice, room.chosen);
  room.q.resize(in.key_dim * lanes);
  room.p.resize(std::ssize(room.chosen) * lanes);
  const auto attend = [&](const Heads& h) {
    const auto row = in.row(s.q_begin + i, h);
    widen_to_lanes(in.q + row * in.key_dim, h.count, in.key_dim, room.q.data());
    for_each_panel(room.chosen, [&](std::int64_t first, std::span<const std::int64_t> keys) {
      room.keys.gather(in.k + h.kv_head * in.key_dim, in.kv_heads * in.key_dim, keys, in.key_dim);
      multiply(room.keys.rows(), std::ssize(keys), room.q.data(), in.key_dim, room.p.data() + first * lanes);
    });
    PerLane<Real> max, sum;
    exponentiate(room.p.data(), std::ssize(room.chosen), in.scale, max, sum);
    room.sums.zero(h.count, in.value_dim);
    for_each_panel(room.chosen, [&](std::int64_t first, std::span<const std::int64_t> keys) {
      room.values.gather(in.v + h.kv_head * in.value_dim, in.kv_heads * in.value_dim, keys, in.value_dim);
      add_products<Real>(room.sums.rows(), h.count, room.values.rows(), std::ssize(keys),
                         {room.p.data() + first * lanes, 1, lanes}, padded<Real>(in.value_dim));
    });
    for (std::int64_t r = 0; r < h.count; ++r) {
      const auto inverse = sum[r] == 0 ? 0 : 1 / sum[r];  // 0: no key was attended to
      store(room.sums.rows()[r], in.value_dim, inverse, out + (row + r) * in.value_dim);
      lse[row + r] = max[r] + std::log(sum[r]);
    }
  };
  for (std::int64_t kv_head = 0; kv_head < in.kv_heads; ++kv_head) in.for_heads_of(kv_head, attend);
}

// Queries worth a thread of their own.
template <typename Scalar>
std::int64_t queries_per_task(const Inputs<Scalar>& in, const Choice& choice) {
  return rows_per_task((choice.blocks.size(1) + 1) * choice.block_size * in.heads * (in.key_dim + in.value_dim));
}

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                       std::int64_t block_size, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                       const std::optional<Tensor>& seqused_k, double scale) {
  const auto sequences = keyed_sequences("block_sparse_attention", q, k, cu_seqlens_q, cu_seqlens_k, seqused_k);
  const auto choice = checked_choice(sequences, blocks, block_size);
  auto out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(wide_type(q.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, q.scalar_type(), "block_sparse_attention", [&] {
    const Inputs<scalar_t> in(q, k, v, scale);
    auto* outs = out.mutable_data_ptr<scalar_t>();
    auto* lses = lse.mutable_data_ptr<Wide<scalar_t>>();
    for (const auto& s : sequences) {
      at::parallel_for(0, s.q_count, queries_per_task(in, choice), [&](std::int64_t first, std::int64_t last) {
        Room<Wide<scalar_t>> room;
        for (auto i = first; i < last; ++i) attend_token(in, s, i, choice, room, outs, lses);
      });
    }
  });
  return {out, lse};
}

// ---- Backward

template <typename Scalar>
struct Gradient {
  using Real = Wide<Scalar>;
  Tensor out_, lse_, delta_;  // dense
  const Scalar* out;          // dO [Tq, Hq, dv]
  const Real *lse, *delta;    // [Tq, Hq]; delta is D

  Gradient(const Tensor& grad_out, const Tensor& outputs, const Tensor& lses)
      : out_(grad_out.contiguous()),
        lse_(lses.contiguous()),
        delta_((grad_out.to(lses.scalar_type()) * outputs.to(lses.scalar_type())).sum(-1).contiguous()),
        out(out_.const_data_ptr<Scalar>()),
        lse(lse_.const_data_ptr<Real>()),
        delta(delta_.const_data_ptr<Real>()) {}
};

// q . k becomes P, and dO . v becomes dS; both [keys, kLanes].
template <typename Real>
SLUICE_MULTIARCH void differentiate_scores(Real* p, Real* grad_scores, std::int64_t keys, Real scale,
                                           const PerLane<Real>& lse, const PerLane<Real>& delta) {
  constexpr auto lanes = kLanes<Real>;
  for (std::int64_t j = 0; j < keys; ++j) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const auto at = j * lanes + lane;
      const Real below = scale * p[at] - lse[lane];
      p[at] = exp_nonpositive(below > 0 ? Real(0) : below);  // rounding may put it above
      grad_scores[at] = p[at] * (grad_scores[at] - delta[lane]) * scale;
    }
  }
}

// P and dS of some query heads of a token, for keys and values that are gathered in rows.
template <typename Scalar>
void differentiate_rows(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, std::int64_t row, const Heads& h,
                        const Wide<Scalar>* const* keys, const Wide<Scalar>* const* values, std::int64_t count,
                        Room<Wide<Scalar>>& room) {
  room.p.resize(count * kLanes<Wide<Scalar>>);
  room.grad_scores.resize(count * kLanes<Wide<Scalar>>);
  multiply(keys, count, room.q.data(), in.key_dim, room.p.data());
  multiply(values, count, room.grad_out.data(), in.value_dim, room.grad_scores.data());
  differentiate_scores(room.p.data(), room.grad_scores.data(), count, in.scale, to_lanes(grad.lse + row, h.count),
                       to_lanes(grad.delta + row, h.count));
}

template <typename Scalar>
void take_lanes(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, std::int64_t row, const Heads& h,
                Room<Wide<Scalar>>& room) {
  room.q.resize(in.key_dim * kLanes<Wide<Scalar>>);
  room.grad_out.resize(in.value_dim * kLanes<Wide<Scalar>>);
  widen_to_lanes(in.q + row * in.key_dim, h.count, in.key_dim, room.q.data());
  widen_to_lanes(grad.out + row * in.value_dim, h.count, in.value_dim, room.grad_out.data());
}

template <typename Scalar>
void query_gradient(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, const KeyedSequence& s, std::int64_t i,
                    const Choice& choice, Room<Wide<Scalar>>& room, Scalar* grad_q) {
  using Real = Wide<Scalar>;
  choose(s, i, choice, room.chosen);
  const auto differentiate = [&](const Heads& h) {
    const auto row = in.row(s.q_begin + i, h);
    take_lanes(in, grad, row, h, room);
    room.sums.zero(h.count, in.key_dim);
    for_each_panel(room.chosen, [&](std::int64_t, std::span<const std::int64_t> keys) {
      const auto count = std::ssize(keys);
      room.keys.gather(in.k + h.kv_head * in.key_dim, in.kv_heads * in.key_dim, keys, in.key_dim);
      room.values.gather(in.v + h.kv_head * in.value_dim, in.kv_heads * in.value_dim, keys, in.value_dim);
      differentiate_rows(in, grad, row, h, room.keys.rows(), room.values.rows(), count, room);
      add_products<Real>(room.sums.rows(), h.count, room.keys.rows(), count, {room.grad_scores.data(), 1, kLanes<Real>},
                         padded<Real>(in.key_dim));
    });
    for (std::int64_t r = 0; r < h.count; ++r) {
      store(room.sums.rows()[r], in.key_dim, Real(1), grad_q + (row + r) * in.key_dim);
    }
  };
  for (std::int64_t kv_head = 0; kv_head < in.kv_heads; ++kv_head) in.for_heads_of(kv_head, differentiate);
}

template <typename Scalar>
void query_gradients(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, const KeyedSequence& s,
                     const Choice& choice, Scalar* grad_q) {
  at::parallel_for(0, s.q_count, queries_per_task(in, choice), [&](std::int64_t first, std::int64_t last) {
    Room<Wide<Scalar>> room;
    for (auto i = first; i < last; ++i) query_gradient(in, grad, s, i, choice, room, grad_q);
  });
}

// The keys of one sequence and kv head from `first` on, and their gradients.
template <typename Scalar>
class Stripe {
 public:
  using Real = Wide<Scalar>;
  Stripe(const Inputs<Scalar>& in, const KeyedSequence& s, std::int64_t kv_head, std::int64_t first, std::int64_t last)
      : in_(in), s_(s), kv_head_(kv_head), first_(first), last_(last), rows_(last - first) {
    std::iota(rows_.begin(), rows_.end(), s.k_begin + first);
    keys_.gather(in.k + kv_head * in.key_dim, in.kv_heads * in.key_dim, rows_, in.key_dim);
    values_.gather(in.v + kv_head * in.value_dim, in.kv_heads * in.value_dim, rows_, in.value_dim);
    grad_k_.zero(last - first, in.key_dim);
    grad_v_.zero(last - first, in.value_dim);
  }

  // Adds what query i gives.
  void take_query(const Gradient<Scalar>& grad, const Choice& choice, std::int64_t i) {
    k_.clear(), v_.clear(), dk_.clear(), dv_.clear();
    choice.for_each_run(s_, i, first_, last_, [&](std::int64_t begin, std::int64_t end) {
      for (auto j = begin - first_; j < end - first_; ++j) {
        k_.push_back(keys_.rows()[j]), v_.push_back(values_.rows()[j]);
        dk_.push_back(grad_k_.rows()[j]), dv_.push_back(grad_v_.rows()[j]);
      }
    });
    const auto count = std::ssize(k_);
    if (count == 0) return;
    in_.for_heads_of(kv_head_, [&](const Heads& h) {
      const auto row = in_.row(s_.q_begin + i, h);
      take_lanes(in_, grad, row, h, room_);
      differentiate_rows(in_, grad, row, h, k_.data(), v_.data(), count, room_);
      head_rows_.resize(h.count);
      std::iota(head_rows_.begin(), head_rows_.end(), row);
      room_.keys.gather(in_.q, in_.key_dim, head_rows_, in_.key_dim);
      room_.values.gather(grad.out, in_.value_dim, head_rows_, in_.value_dim);
      constexpr auto lanes = kLanes<Real>;
      add_products<Real>(dk_.data(), count, room_.keys.rows(), h.count, {room_.grad_scores.data(), lanes, 1},
                         padded<Real>(in_.key_dim));
      add_products<Real>(dv_.data(), count, room_.values.rows(), h.count, {room_.p.data(), lanes, 1},
                         padded<Real>(in_.value_dim));
    });
  }

  void write(Scalar* grad_k, Scalar* grad_v) {
    for (std::size_t j = 0; j < rows_.size(); ++j) {
      const auto row = rows_[j] * in_.kv_heads + kv_head_;
      store(grad_k_.rows()[j], in_.key_dim, Real(1), grad_k + row * in_.key_dim);
      store(grad_v_.rows()[j], in_.value_dim, Real(1), grad_v + row * in_.value_dim);
    }
  }

 private:
  const Inputs<Scalar>& in_;
  const KeyedSequence& s_;
  std::int64_t kv_head_, first_, last_;
  std::vector<std::int64_t> rows_, head_rows_;
  Panel<Real> keys_, values_, grad_k_, grad_v_;
  std::vector<const Real*> k_, v_;  // rows of the stripe that a query attends to
  std::vector<Real*> dk_, dv_;
  Room<Real> room_;
};

struct StripePlace {
  std::int64_t sequence, kv_head, first, last;
};

std::vector<StripePlace> cut_stripes(const std::vector<KeyedSequence>& sequences, std::int64_t kv_heads) {
  std::vector<StripePlace> stripes;
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const auto keys = sequences[n].k_count;
    for (std::int64_t first = 0; first < keys; first += kStripe) {
      for (std::int64_t h = 0; h < kv_heads; ++h) {
        stripes.push_back({static_cast<std::int64_t>(n), h, first, std::min(keys, first + kStripe)});
      }
    }
  }
  return stripes;
}

template <typename Scalar>
void key_gradients(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, const KeyedSequence& s, const Choice& choice,
                   const StripePlace& place, Scalar* grad_k, Scalar* grad_v) {
  Stripe<Scalar> stripe(in, s, place.kv_head, place.first, place.last);
  const auto first_query =
      std::max<std::int64_t>(0, s.q_count - s.k_count + place.first);  // the first to see a key of it
  for (auto i = first_query; i < s.q_count; ++i) stripe.take_query(grad, choice, i);
  stripe.write(grad_k, grad_v);
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                const Tensor& v, const Tensor& out, const Tensor& lse,
                                                const Tensor& blocks, std::int64_t block_size,
                                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                const std::optional<Tensor>& seqused_k, double scale) {
  const auto sequences = keyed_sequences("block_sparse_attention", q, k, cu_seqlens_q, cu_seqlens_k, seqused_k);
  check_apart("block_sparse_attention", sequences);
  const auto choice = checked_choice(sequences, blocks, block_size);
  auto grad_q = at::empty(q.sizes(), q.options()), grad_k = at::zeros(k.sizes(), k.options()),
       grad_v = at::zeros(v.sizes(), v.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, q.scalar_type(), "block_sparse_attention_backward", [&] {
    const Inputs<scalar_t> in(q, k, v, scale);
    const Gradient<scalar_t> grad(grad_out, out, lse);
    for (const auto& s : sequences) query_gradients(in, grad, s, choice, grad_q.mutable_data_ptr<scalar_t>());
    const auto stripes = cut_stripes(sequences, in.kv_heads);
    const auto count = static_cast<std::int64_t>(stripes.size());
    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) {
        key_gradients(in, grad, sequences[stripes[i].sequence], choice, stripes[i], grad_k.mutable_data_ptr<scalar_t>(),
                      grad_v.mutable_data_ptr<scalar_t>());
      }
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("block_sparse_attention", forward_cpu);
  m.impl("block_sparse_attention_backward", backward_cpu);
}

}  // namespace sluice
