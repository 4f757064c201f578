// SPDX-License-Identifier: Apache-2.0
// CPU path. Forward and the gradient of q run over query tokens, each alone: its kv heads' chosen keys are walked once,
// and a key meets all query heads of its kv head while it is in the first-level cache. The gradients of k and v run
// over stripes of keys: a task owns the rows of one stripe and kv head, and walks the queries that attend into it. With
// D_i = dO_i . O_i:
//   P = exp(scale q . k - lse)    dS = scale P (dO . v - D)    dq += dS k    dk += dS q    dv += P dO
// Both walks compute P and dS again rather than store them, so memory stays linear, and no two tasks write one row.
// Sums run over keys, or over queries, in rising order.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/choice.h"
#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kStripe = 256;  // keys of a task of the second walk: 512 KiB of gradients at 256 dims

template <typename Scalar>
struct Inputs {
  using Real = Wide<Scalar>;
  Tensor q_, k_, v_;  // dense
  const Scalar *q, *k, *v;
  std::int64_t heads, kv_heads, group, key_dim, value_dim;
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
        group(heads / kv_heads),
        key_dim(k_.size(2)),
        value_dim(v_.size(2)),
        scale(static_cast<Real>(score_scale)) {}

  // Rows of the query heads of kv head h at a token are neighbours, from this one on.
  std::int64_t row(std::int64_t token, std::int64_t kv_head) const { return token * heads + kv_head * group; }
  const Scalar* key(std::int64_t row, std::int64_t kv_head) const { return k + (row * kv_heads + kv_head) * key_dim; }
  const Scalar* value(std::int64_t row, std::int64_t kv_head) const {
    return v + (row * kv_heads + kv_head) * value_dim;
  }
};

template <typename Scalar>
SLUICE_INLINE Wide<Scalar> dot(const Scalar* a, const Scalar* b, std::int64_t width) {
  return lane_sum<Wide<Scalar>>(width, [a, b](std::int64_t i) { return widen(a[i]) * widen(b[i]); });
}

// sum += factor * row.
template <typename Scalar>
SLUICE_INLINE void add_scaled(Wide<Scalar>* __restrict sum, Wide<Scalar> factor, const Scalar* __restrict row,
                              std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) sum[i] += factor * widen(row[i]);
}

// ---- Forward

// Scores of a run of keys for all rows of a group: scores[r * stride + j].
template <typename Scalar>
SLUICE_MULTIARCH void score_run(const Inputs<Scalar>& in, std::int64_t first_row, std::int64_t kv_head,
                                std::int64_t first_key, std::int64_t count, Wide<Scalar>* scores, std::int64_t stride) {
  for (std::int64_t j = 0; j < count; ++j) {
    const auto* key = in.key(first_key + j, kv_head);
    for (std::int64_t r = 0; r < in.group; ++r) {
      scores[r * stride + j] = in.scale * dot(in.q + (first_row + r) * in.key_dim, key, in.key_dim);
    }
  }
}

// Scores of each row become probabilities that are not yet divided by their sum.
template <typename Real>
SLUICE_MULTIARCH void exponentiate(Real* scores, std::int64_t rows, std::int64_t count, Real* max, Real* sum) {
  for (std::int64_t r = 0; r < rows; ++r) {
    auto* row = scores + r * count;
    max[r] = lane_max(row, count);
    for (std::int64_t j = 0; j < count; ++j) row[j] = exp_nonpositive(row[j] - max[r]);
    sum[r] = lane_sum<Real>(count, [row](std::int64_t j) { return row[j]; });
  }
}

template <typename Scalar>
SLUICE_MULTIARCH void add_values(const Inputs<Scalar>& in, std::int64_t kv_head, std::int64_t first_key,
                                 std::int64_t count, const Wide<Scalar>* p, std::int64_t stride, Wide<Scalar>* acc) {
  for (std::int64_t j = 0; j < count; ++j) {
    const auto* value = in.value(first_key + j, kv_head);
    for (std::int64_t r = 0; r < in.group; ++r) {
      add_scaled<Scalar>(acc + r * in.value_dim, p[r * stride + j], value, in.value_dim);
    }
  }
}

template <typename Scalar>
SLUICE_MULTIARCH void finish_rows(const Wide<Scalar>* acc, const Wide<Scalar>* max, const Wide<Scalar>* sum,
                                  std::int64_t rows, std::int64_t width, Scalar* out, Wide<Scalar>* lse) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto inverse = sum[r] == 0 ? 0 : 1 / sum[r];  // 0: no key was attended to
    for (std::int64_t c = 0; c < width; ++c) out[r * width + c] = narrow<Scalar>(acc[r * width + c] * inverse);
    lse[r] = max[r] + std::log(sum[r]);
  }
}

// Room of one task, kept over its queries.
template <typename Real>
struct Scratch {
  std::vector<Real> scores, acc, max, sum;
};

template <typename Scalar>
void attend_token(const Inputs<Scalar>& in, const KeyedSequence& s, std::int64_t query, const Choice& choice,
                  Scratch<Wide<Scalar>>& room, Scalar* out, Wide<Scalar>* lse) {
  const auto keys = choice.keys(s, query);
  room.scores.resize(in.group * keys);
  room.max.resize(in.group);
  room.sum.resize(in.group);
  for (std::int64_t h = 0; h < in.kv_heads; ++h) {
    const auto row = in.row(s.q_begin + query, h);
    std::int64_t done = 0;
    choice.for_each_run(s, query, 0, s.k_count, [&](std::int64_t begin, std::int64_t end) {
      score_run(in, row, h, s.k_begin + begin, end - begin, room.scores.data() + done, keys);
      done += end - begin;
    });
    exponentiate(room.scores.data(), in.group, keys, room.max.data(), room.sum.data());
    room.acc.assign(in.group * in.value_dim, 0);
    done = 0;
    choice.for_each_run(s, query, 0, s.k_count, [&](std::int64_t begin, std::int64_t end) {
      add_values(in, h, s.k_begin + begin, end - begin, room.scores.data() + done, keys, room.acc.data());
      done += end - begin;
    });
    finish_rows(room.acc.data(), room.max.data(), room.sum.data(), in.group, in.value_dim, out + row * in.value_dim,
                lse + row);
  }
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
        Scratch<Wide<scalar_t>> room;
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

template <typename Real>
struct Pair {
  Real p, grad_score;
};

// P and dS of one row of q and one key.
template <typename Scalar>
SLUICE_INLINE Pair<Wide<Scalar>> differentiate_pair(const Inputs<Scalar>& in, const Gradient<Scalar>& grad,
                                                    std::int64_t row, const Scalar* key, const Scalar* value) {
  using Real = Wide<Scalar>;
  const Real below = in.scale * dot(in.q + row * in.key_dim, key, in.key_dim) - grad.lse[row];
  const Real p = exp_nonpositive(below > 0 ? Real(0) : below);  // rounding may put it above
  const Real grad_p = dot(grad.out + row * in.value_dim, value, in.value_dim);
  return {.p = p, .grad_score = p * (grad_p - grad.delta[row]) * in.scale};
}

// dq of the rows of a group, for a run of keys; acc [group, key_dim].
template <typename Scalar>
SLUICE_MULTIARCH void add_query_gradient(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, std::int64_t first_row,
                                         std::int64_t kv_head, std::int64_t first_key, std::int64_t count,
                                         Wide<Scalar>* acc) {
  for (auto j = first_key; j < first_key + count; ++j) {
    const auto *key = in.key(j, kv_head), *value = in.value(j, kv_head);
    for (std::int64_t r = 0; r < in.group; ++r) {
      const auto pair = differentiate_pair(in, grad, first_row + r, key, value);
      add_scaled<Scalar>(acc + r * in.key_dim, pair.grad_score, key, in.key_dim);
    }
  }
}

// dk and dv of a run of keys, for the rows of a group; they are added to.
template <typename Scalar>
SLUICE_MULTIARCH void add_key_gradients(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, std::int64_t first_row,
                                        std::int64_t kv_head, std::int64_t first_key, std::int64_t count,
                                        Wide<Scalar>* grad_k, Wide<Scalar>* grad_v) {
  for (std::int64_t j = 0; j < count; ++j) {
    const auto *key = in.key(first_key + j, kv_head), *value = in.value(first_key + j, kv_head);
    for (std::int64_t r = 0; r < in.group; ++r) {
      const auto row = first_row + r;
      const auto pair = differentiate_pair(in, grad, row, key, value);
      add_scaled<Scalar>(grad_k + j * in.key_dim, pair.grad_score, in.q + row * in.key_dim, in.key_dim);
      add_scaled<Scalar>(grad_v + j * in.value_dim, pair.p, grad.out + row * in.value_dim, in.value_dim);
    }
  }
}

template <typename Scalar>
SLUICE_MULTIARCH void store(const Wide<Scalar>* from, std::int64_t count, Scalar* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = narrow<Scalar>(from[i]);
}

template <typename Scalar>
void query_gradients(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, const KeyedSequence& s,
                     const Choice& choice, Scalar* grad_q) {
  at::parallel_for(0, s.q_count, queries_per_task(in, choice), [&](std::int64_t first, std::int64_t last) {
    std::vector<Wide<Scalar>> acc;
    for (auto i = first; i < last; ++i) {
      for (std::int64_t h = 0; h < in.kv_heads; ++h) {
        const auto row = in.row(s.q_begin + i, h);
        acc.assign(in.group * in.key_dim, 0);
        choice.for_each_run(s, i, 0, s.k_count, [&](std::int64_t begin, std::int64_t end) {
          add_query_gradient(in, grad, row, h, s.k_begin + begin, end - begin, acc.data());
        });
        store(acc.data(), in.group * in.key_dim, grad_q + row * in.key_dim);
      }
    }
  });
}

// Keys [first, last) of one sequence and kv head.
template <typename Scalar>
void stripe_gradients(const Inputs<Scalar>& in, const Gradient<Scalar>& grad, const KeyedSequence& s,
                      const Choice& choice, std::int64_t kv_head, std::int64_t first, std::int64_t last, Scalar* grad_k,
                      Scalar* grad_v) {
  std::vector<Wide<Scalar>> keys((last - first) * in.key_dim), values((last - first) * in.value_dim);
  const auto first_query = std::max<std::int64_t>(0, s.q_count - s.k_count + first);  // the first that sees key `first`
  for (auto i = first_query; i < s.q_count; ++i) {
    choice.for_each_run(s, i, first, last, [&](std::int64_t begin, std::int64_t end) {
      add_key_gradients(in, grad, in.row(s.q_begin + i, kv_head), kv_head, s.k_begin + begin, end - begin,
                        keys.data() + (begin - first) * in.key_dim, values.data() + (begin - first) * in.value_dim);
    });
  }
  for (auto j = first; j < last; ++j) {
    const auto row = (s.k_begin + j) * in.kv_heads + kv_head;
    store(keys.data() + (j - first) * in.key_dim, in.key_dim, grad_k + row * in.key_dim);
    store(values.data() + (j - first) * in.value_dim, in.value_dim, grad_v + row * in.value_dim);
  }
}

struct Stripe {
  std::int64_t sequence, kv_head, first, last;
};

std::vector<Stripe> cut_stripes(const std::vector<KeyedSequence>& sequences, std::int64_t kv_heads) {
  std::vector<Stripe> stripes;
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
        const auto& stripe = stripes[i];
        stripe_gradients(in, grad, sequences[stripe.sequence], choice, stripe.kv_head, stripe.first, stripe.last,
                         grad_k.mutable_data_ptr<scalar_t>(), grad_v.mutable_data_ptr<scalar_t>());
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
