// SPDX-License-Identifier: Apache-2.0
// CPU path. A sequence is cut into chunks; inside a chunk the recurrence becomes matrix products (the WY form of the
// chunk's Householder-like updates), between chunks the state is carried serially. All chunks of all sequences and
// heads go through the same batched products; step j of the serial part takes chunk j of every sequence that has one.
// With rows i, j of one chunk, incoming state S, D_i the decay from the chunk's start to i (inclusive), D_ij = D_i /
// D_j for i >= j (always <= 1, so nothing overflows):
//   A_ij = beta_i (k_i . k_j) D_ij for i > j           M = (I + A)^-1, unit lower triangular
//   X = V - D K S      V' = M (beta X)                  what the chunk writes
//   O = D Q S + P V'   P_ij = (q_i . k_j) D_ij for i >= j
//   S <- D_C S + sum_i (D_C / D_i) k_i V'_i^T
// Sequences of at most kShort tokens run the recurrence itself, which for a few tokens is one pass over the state.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"

namespace sluice {
namespace {

constexpr std::int64_t kShort = 16;
constexpr std::int64_t kLargestChunk = 64;

// Work on pairs within a chunk grows with its size, work on the state falls; they meet near the head dim.
std::int64_t chunk_size(std::int64_t key_dim, std::int64_t value_dim) {
  return std::max(key_dim, value_dim) <= 64 ? 32 : kLargestChunk;
}

// The chunks of some sequences, all of `size` tokens but each sequence's last. Ordered by step: chunk 0 of every
// sequence, then chunk 1 of every sequence that has one, longest sequence first, so that each step's chunks are
// neighbours and the sequences still running are a prefix.
struct Chunks {
  std::int64_t size = 0;
  std::vector<std::int64_t> sequences;      // longest first
  std::vector<std::int64_t> begin, tokens;  // of each chunk: first token, real tokens
  std::vector<std::int64_t> step_begin;     // step j's chunks are [step_begin[j], step_begin[j + 1])
  std::int64_t count() const { return static_cast<std::int64_t>(begin.size()); }
  std::int64_t steps() const { return static_cast<std::int64_t>(step_begin.size()) - 1; }
};

Chunks make_chunks(const std::vector<std::int64_t>& bounds, std::vector<std::int64_t> sequences, std::int64_t size) {
  Chunks chunks{.size = size, .sequences = std::move(sequences), .begin = {}, .tokens = {}, .step_begin = {0}};
  const auto length = [&](std::int64_t n) { return bounds[n + 1] - bounds[n]; };
  std::ranges::stable_sort(chunks.sequences, [&](auto a, auto b) { return length(a) > length(b); });
  for (std::int64_t step = 0;; ++step) {
    for (const auto n : chunks.sequences) {
      if (length(n) <= step * size) break;
      chunks.begin.push_back(bounds[n] + step * size);
      chunks.tokens.push_back(std::min(size, length(n) - step * size));
    }
    if (chunks.count() == chunks.step_begin.back()) return chunks;
    chunks.step_begin.push_back(chunks.count());
  }
}

// [T, h, D] by token to [chunks, h * repeat, size, D] by chunk; head j reads head j / repeat; missing tokens are zero,
// which is neutral: k = v = beta = 0 writes nothing and g = 0 does not decay.
template <typename Scalar>
Tensor to_chunks(const Tensor& x, const Chunks& chunks, std::int64_t repeat) {
  const auto dense = x.contiguous();
  const auto source_heads = dense.size(1), heads = source_heads * repeat, width = dense.size(2);
  auto out = at::empty({chunks.count(), heads, chunks.size, width}, dense.options());
  const auto* from = dense.const_data_ptr<Scalar>();
  auto* to = out.mutable_data_ptr<Scalar>();
  at::parallel_for(0, chunks.count() * heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (auto i = first; i < last; ++i) {
      const auto chunk = i / heads, head = i % heads / repeat;
      auto* row = to + i * chunks.size * width;
      for (std::int64_t t = 0; t < chunks.tokens[chunk]; ++t, row += width) {
        std::copy_n(from + ((chunks.begin[chunk] + t) * source_heads + head) * width, width, row);
      }
      std::fill_n(row, (chunks.size - chunks.tokens[chunk]) * width, Scalar(0));
    }
  });
  return out;
}

// The way back, into the rows of `out` [T, h, D]; `repeat` heads of x [chunks, h * repeat, size, D] add up to one of
// out.
template <typename Scalar>
void from_chunks(const Tensor& x, const Chunks& chunks, std::int64_t repeat, Tensor& out) {
  const auto dense = x.contiguous();
  const auto heads = out.size(1), width = out.size(2);
  const auto* from = dense.const_data_ptr<Scalar>();
  auto* to = out.mutable_data_ptr<Scalar>();
  at::parallel_for(0, chunks.count() * heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (auto i = first; i < last; ++i) {
      const auto chunk = i / heads, head = i % heads;
      for (std::int64_t t = 0; t < chunks.tokens[chunk]; ++t) {
        auto* row = to + ((chunks.begin[chunk] + t) * heads + head) * width;
        const auto* first_copy = from + ((chunk * heads + head) * repeat * chunks.size + t) * width;
        std::copy_n(first_copy, width, row);
        for (std::int64_t r = 1; r < repeat; ++r) {
          const auto* copy = first_copy + r * chunks.size * width;
          for (std::int64_t d = 0; d < width; ++d) row[d] += copy[d];
        }
      }
    }
  });
}

template <typename Scalar>
SLUICE_MULTIARCH void scale_range(const Scalar* __restrict from, const Scalar* __restrict factor, std::int64_t first,
                                  std::int64_t last, std::int64_t width, Scalar* __restrict to) {
  for (auto row = first; row < last; ++row) {
    for (std::int64_t d = 0; d < width; ++d) to[row * width + d] = from[row * width + d] * factor[row];
  }
}

template <typename Scalar>
SLUICE_MULTIARCH void dot_range(const Scalar* __restrict a, const Scalar* __restrict b, std::int64_t first,
                                std::int64_t last, std::int64_t width, Scalar* __restrict dots) {
  for (auto row = first; row < last; ++row) {
    Scalar sum = 0;
    for (std::int64_t d = 0; d < width; ++d) sum += a[row * width + d] * b[row * width + d];
    dots[row] = sum;
  }
}

// x [..., D] times factor [..., 1], both dense, row by row; ATen's broadcast product takes one call a row.
Tensor scaled(const Tensor& x, const Tensor& factor) {
  auto out = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scaled", [&] {
    const auto *from = x.const_data_ptr<scalar_t>(), *by = factor.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    const auto width = x.size(-1);
    at::parallel_for(0, factor.numel(), 256,
                     [=](std::int64_t first, std::int64_t last) { scale_range(from, by, first, last, width, to); });
  });
  return out;
}

// Sum over D of a b, both [..., D] and dense, as [..., 1].
Tensor row_dots(const Tensor& a, const Tensor& b) {
  auto dots = at::empty_like(a.narrow(-1, 0, 1), at::MemoryFormat::Contiguous);
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "row_dots", [&] {
    const auto *x = a.const_data_ptr<scalar_t>(), *y = b.const_data_ptr<scalar_t>();
    auto* to = dots.mutable_data_ptr<scalar_t>();
    const auto width = a.size(-1);
    at::parallel_for(0, dots.numel(), 256,
                     [=](std::int64_t first, std::int64_t last) { dot_range(x, y, first, last, width, to); });
  });
  return dots;
}

// Of one chunk and head, from the running sum of its log decays [C]: D [C], D_C / D_i [C] and D_ij [C, C]. The sums are
// float64, since their differences cancel: a chunk that decays by e^-1000 would lose three digits of the rest.
template <typename Scalar>
SLUICE_MULTIARCH void decay_factors(const double* __restrict log_decay, std::int64_t size, Scalar* __restrict decay,
                                    Scalar* __restrict rest, Scalar* __restrict pair) {
  for (std::int64_t i = 0; i < size; ++i) {
    decay[i] = exp_nonpositive(static_cast<Scalar>(log_decay[i]));
    rest[i] = exp_nonpositive(static_cast<Scalar>(log_decay[size - 1] - log_decay[i]));
    Scalar* row = pair + i * size;
    for (std::int64_t j = 0; j <= i; ++j) row[j] = exp_nonpositive(static_cast<Scalar>(log_decay[i] - log_decay[j]));
    std::fill(row + i + 1, row + size, Scalar(0));
  }
}

// Of one chunk and head: M = (I + A)^-1 for A_ij = beta_i (k_i . k_j) D_ij, by forward substitution.
template <typename Scalar>
SLUICE_MULTIARCH void invert_unit_lower(const Scalar* __restrict kk, const Scalar* __restrict pair,
                                        const Scalar* __restrict beta, std::int64_t size, Scalar* __restrict inverse) {
  for (std::int64_t i = 0; i < size; ++i) {
    Scalar row[kLargestChunk] = {};
    for (std::int64_t j = 0; j < i; ++j) {
      const Scalar factor = beta[i] * kk[i * size + j] * pair[i * size + j];
      const Scalar* done = inverse + j * size;
      for (std::int64_t c = 0; c <= j; ++c) row[c] -= factor * done[c];
    }
    row[i] = 1;
    std::copy_n(row, size, inverse + i * size);
  }
}

// Of one chunk and head, the gradients through its pairs. In: d_attend_ij = dO_i . V'_j and d_solve_ij = dR_i . V'_j.
// Out: d_attend_ij becomes the gradient of q_i . k_j, d_solve_ij that of k_i . k_j; what A gives to beta is added to
// d_beta; and crossing_t is the sum over pairs i >= t > j of what they give to log D_ij.
template <typename Scalar>
SLUICE_MULTIARCH void pair_gradients(const Scalar* __restrict pair, const Scalar* __restrict kk,
                                     const Scalar* __restrict qk, const Scalar* __restrict beta, std::int64_t size,
                                     Scalar* __restrict d_attend, Scalar* __restrict d_solve, Scalar* __restrict d_beta,
                                     Scalar* __restrict crossing) {
  Scalar later[kLargestChunk] = {};  // of each column, over the rows from t on
  for (auto t = size - 1; t >= 0; --t) {
    const auto row = t * size;
    Scalar to_beta = 0, sum = 0;
    for (std::int64_t j = 0; j < t; ++j) {
      const Scalar solve = -d_solve[row + j] * pair[row + j];
      to_beta += solve * kk[row + j];
      d_solve[row + j] = solve * beta[t];
      d_attend[row + j] *= pair[row + j];
      later[j] += d_attend[row + j] * qk[row + j] + d_solve[row + j] * kk[row + j];
      sum += later[j];
    }
    std::fill(d_solve + row + t, d_solve + row + size, Scalar(0));
    std::fill(d_attend + row + t + 1, d_attend + row + size, Scalar(0));  // D_tt = 1
    d_beta[t] += to_beta;
    crossing[t] = sum;
  }
}

// The recurrence for one sequence and value head. q is scaled; state [K, V] is updated in place.
template <typename Scalar>
SLUICE_MULTIARCH void recur(const Scalar* __restrict q, const Scalar* __restrict k, const Scalar* __restrict v,
                            Scalar decay, Scalar beta, Scalar* __restrict state, Scalar* __restrict out,
                            Scalar* __restrict written, std::int64_t key_dim, std::int64_t value_dim) {
  std::fill_n(written, value_dim, Scalar(0));
  for (std::int64_t i = 0; i < key_dim; ++i) {
    Scalar* row = state + i * value_dim;
    for (std::int64_t j = 0; j < value_dim; ++j) {
      row[j] *= decay;
      written[j] += k[i] * row[j];
    }
  }
  for (std::int64_t j = 0; j < value_dim; ++j) written[j] = beta * (v[j] - written[j]);
  std::fill_n(out, value_dim, Scalar(0));
  for (std::int64_t i = 0; i < key_dim; ++i) {
    Scalar* row = state + i * value_dim;
    for (std::int64_t j = 0; j < value_dim; ++j) {
      row[j] += k[i] * written[j];
      out[j] += q[i] * row[j];
    }
  }
}

template <typename Scalar>
void forward_short(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                   const std::vector<std::int64_t>& bounds, const std::vector<std::int64_t>& sequences, Tensor& out,
                   Tensor& state) {
  const auto key_heads = q.size(1), heads = v.size(1), key_dim = q.size(2), value_dim = v.size(2);
  const auto count = static_cast<std::int64_t>(sequences.size());
  const auto *qs = q.const_data_ptr<Scalar>(), *ks = k.const_data_ptr<Scalar>(), *vs = v.const_data_ptr<Scalar>();
  const auto *gs = g.const_data_ptr<Scalar>(), *bs = beta.const_data_ptr<Scalar>();
  auto *outs = out.mutable_data_ptr<Scalar>(), *states = state.mutable_data_ptr<Scalar>();
  at::parallel_for(0, count * heads, 1, [&](std::int64_t first, std::int64_t last) {
    std::vector<Scalar> written(value_dim);
    for (auto i = first; i < last; ++i) {
      const auto n = sequences[i / heads], head = i % heads, key_head = head * key_heads / heads;
      for (auto t = bounds[n]; t < bounds[n + 1]; ++t) {
        const auto key_row = (t * key_heads + key_head) * key_dim, row = t * heads + head;
        recur(qs + key_row, ks + key_row, vs + row * value_dim, std::exp(gs[row]), bs[row],
              states + (n * heads + head) * key_dim * value_dim, outs + row * value_dim, written.data(), key_dim,
              value_dim);
      }
    }
  });
}

// What the products of one set of chunks need, all in the accumulation type. N chunks, H value heads, C tokens a chunk.
struct ChunkTerms {
  Tensor q, k, v, beta;  // [N, H, C, K] x2 (q scaled), [N, H, C, V], [N, H, C, 1]
  Tensor decay;          // D      [N, H, C, 1]
  Tensor rest;           // D_C / D_i [N, H, C, 1]
  Tensor total;          // D_C    [N, H, 1, 1]
  Tensor pair;           // D_ij, zero above the diagonal [N, H, C, C]
  Tensor kk;             // k_i . k_j [N, H, C, C]
  Tensor inverse;        // M      [N, H, C, C]
};

template <typename Scalar>
ChunkTerms chunk_terms(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                       const Chunks& chunks) {
  const auto repeat = v.size(1) / q.size(1);
  ChunkTerms terms;
  terms.q = to_chunks<Scalar>(q, chunks, repeat);
  terms.k = to_chunks<Scalar>(k, chunks, repeat);
  terms.v = to_chunks<Scalar>(v, chunks, 1);
  terms.beta = to_chunks<Scalar>(beta.unsqueeze(2), chunks, 1);
  const Tensor log_decay = to_chunks<Scalar>(g.unsqueeze(2), chunks, 1).to(kDouble).cumsum(2);  // [N, H, C, 1]
  terms.decay = at::empty_like(terms.beta);
  terms.rest = at::empty_like(terms.beta);
  terms.kk = terms.k.matmul(terms.k.transpose(2, 3));
  terms.pair = at::empty_like(terms.kk);
  terms.inverse = at::empty_like(terms.kk);
  const auto* logs = log_decay.const_data_ptr<double>();
  const auto *strengths = terms.beta.const_data_ptr<Scalar>(), *products = terms.kk.const_data_ptr<Scalar>();
  auto *decay = terms.decay.mutable_data_ptr<Scalar>(), *rest = terms.rest.mutable_data_ptr<Scalar>();
  auto *pair = terms.pair.mutable_data_ptr<Scalar>(), *inverse = terms.inverse.mutable_data_ptr<Scalar>();
  const auto size = chunks.size, square = size * size;
  at::parallel_for(0, chunks.count() * v.size(1), 1, [=](std::int64_t first, std::int64_t last) {
    for (auto m = first; m < last; ++m) {
      decay_factors(logs + m * size, size, decay + m * size, rest + m * size, pair + m * square);
      invert_unit_lower(products + m * square, pair + m * square, strengths + m * size, size, inverse + m * square);
    }
  });
  terms.total = terms.decay.narrow(2, size - 1, 1);
  return terms;
}

// Matrix product of the two last dims for a step's neighbours, added into `out`.
void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
  auto flat = out.flatten(0, 1);
  flat.baddbmm_(a.flatten(0, 1), b.flatten(0, 1));
}

// The serial part: writes what each chunk writes, V' [N, H, C, V], and the state that it saw, [N, H, K, V]; `state`
// [sequences, H, K, V], longest sequence first, becomes the final one.
void carry_states(const ChunkTerms& terms, const Chunks& chunks, Tensor& state, Tensor& written, Tensor& seen) {
  const auto keys_out = scaled(terms.k, terms.rest).transpose(2, 3);
  for (std::int64_t step = 0; step < chunks.steps(); ++step) {
    const auto first = chunks.step_begin[step], count = chunks.step_begin[step + 1] - first;
    const auto of = [&](const Tensor& x) { return x.narrow(0, first, count); };
    auto running = state.narrow(0, 0, count);
    of(seen).copy_(running);
    const auto wanted = of(terms.v) - scaled(of(terms.k).matmul(running), of(terms.decay));
    of(written).copy_(of(terms.inverse).matmul(scaled(wanted, of(terms.beta))));
    running.mul_(of(terms.total));
    add_product(running, of(keys_out), of(written));
  }
}

struct ChunkRun {
  ChunkTerms terms;
  Tensor written, seen;  // V', and the incoming state of each chunk
};

template <typename Scalar>
ChunkRun run_chunks(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                    const Chunks& chunks, Tensor& state) {
  ChunkRun run{.terms = chunk_terms<Scalar>(q, k, v, g, beta, chunks), .written = {}, .seen = {}};
  run.written = at::empty_like(run.terms.v);
  run.seen = at::empty({chunks.count(), v.size(1), q.size(2), v.size(2)}, v.options());
  carry_states(run.terms, chunks, state, run.written, run.seen);
  return run;
}

Tensor sequence_index(const Chunks& chunks) { return at::tensor(chunks.sequences, at::TensorOptions().dtype(kLong)); }

// Inputs in the accumulation type, normalised and scaled.
struct Prepared {
  at::ScalarType type;
  Tensor q, k, v, g, beta;                // q scaled
  Tensor q_inverse_norm, k_inverse_norm;  // [T, Hk, 1], undefined without normalisation
};

Prepared prepare(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, double scale,
                 bool qk_l2norm) {
  const auto type = v.scalar_type() == kDouble ? kDouble : kFloat;
  Prepared in{.type = type,
              .q = q.to(type).contiguous(),
              .k = k.to(type).contiguous(),
              .v = v.to(type).contiguous(),
              .g = g.contiguous(),
              .beta = beta.contiguous(),
              .q_inverse_norm = {},
              .k_inverse_norm = {}};
  if (qk_l2norm) {
    const auto inverse_norm = [](const Tensor& x) { return row_dots(x, x).add_(1e-6).rsqrt_(); };
    in.q_inverse_norm = inverse_norm(in.q);
    in.k_inverse_norm = inverse_norm(in.k);
    in.q = scaled(in.q, in.q_inverse_norm * scale);
    in.k = scaled(in.k, in.k_inverse_norm);
  } else {
    in.q = in.q * scale;
  }
  return in;
}

// Sequences by the way that they take.
struct Classes {
  std::vector<std::int64_t> brief, lengthy;
};
Classes classify(const std::vector<std::int64_t>& bounds) {
  Classes classes;
  for (std::int64_t n = 0; n + 1 < static_cast<std::int64_t>(bounds.size()); ++n) {
    const auto length = bounds[n + 1] - bounds[n];
    if (length > 0) (length <= kShort ? classes.brief : classes.lengthy).push_back(n);
  }
  return classes;
}

Tensor start_state(const std::optional<Tensor>& initial_state, const Prepared& in, std::int64_t sequences) {
  return initial_state ? initial_state->clone(at::MemoryFormat::Contiguous)
                       : at::zeros({sequences, in.v.size(1), in.k.size(2), in.v.size(2)}, in.v.options());
}

std::tuple<Tensor, Tensor, Tensor> forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                               const Tensor& beta, const Tensor& cu_seqlens,
                                               const std::optional<Tensor>& initial_state, double scale, bool qk_l2norm,
                                               bool output_final_state) {
  const auto bounds = checked_bounds("gated_delta_rule", cu_seqlens, v.size(0));
  const auto in = prepare(q, k, v, g, beta, scale, qk_l2norm);
  const auto [brief, lengthy] = classify(bounds);
  auto out = at::empty_like(in.v);
  auto state = start_state(initial_state, in, cu_seqlens.size(0) - 1);
  AT_DISPATCH_FLOATING_TYPES(in.type, "gated_delta_rule", [&] {
    forward_short<scalar_t>(in.q, in.k, in.v, in.g, in.beta, bounds, brief, out, state);
    if (lengthy.empty()) return;
    const auto chunks = make_chunks(bounds, lengthy, chunk_size(k.size(2), v.size(2)));
    const auto order = sequence_index(chunks);
    auto carried = state.index_select(0, order);
    const auto run = run_chunks<scalar_t>(in.q, in.k, in.v, in.g, in.beta, chunks, carried);
    auto o = scaled(run.terms.q.matmul(run.seen), run.terms.decay);
    const auto attend = run.terms.q.matmul(run.terms.k.transpose(2, 3)).mul_(run.terms.pair);
    add_product(o, attend, run.written);
    from_chunks<scalar_t>(o, chunks, 1, out);
    state.index_copy_(0, order, carried);
  });
  if (!output_final_state) state = at::empty({0, v.size(1), q.size(2), v.size(2)}, state.options());
  return {out.to(v.scalar_type()), state, at::empty({0}, state.options())};
}

// Gradients of one set of chunks, added into the rows of the outputs. d_state: gradient of the final states of
// chunks.sequences, in that order; becomes that of their initial states.
struct Gradients {
  Tensor q, k, v, g, beta;  // as the Prepared inputs
};

// Sum over the rows from each one to the last, [N, H, C, D].
Tensor suffix_sum(const Tensor& x) { return x.flip(2).cumsum(2).flip(2); }

// pair_gradients() for every chunk and head.
template <typename Scalar>
void through_pairs(const ChunkTerms& terms, const Tensor& qk, Tensor& d_attend, Tensor& d_kk, Tensor& d_beta,
                   Tensor& crossing) {
  const auto size = qk.size(2), square = size * size;
  const auto *pair = terms.pair.const_data_ptr<Scalar>(), *kk = terms.kk.const_data_ptr<Scalar>(),
             *products = qk.const_data_ptr<Scalar>(), *beta = terms.beta.const_data_ptr<Scalar>();
  auto *attend = d_attend.mutable_data_ptr<Scalar>(), *solve = d_kk.mutable_data_ptr<Scalar>(),
       *strength = d_beta.mutable_data_ptr<Scalar>(), *across = crossing.mutable_data_ptr<Scalar>();
  at::parallel_for(0, qk.numel() / square, 1, [=](std::int64_t first, std::int64_t last) {
    for (auto m = first; m < last; ++m) {
      pair_gradients(pair + m * square, kk + m * square, products + m * square, beta + m * size, size,
                     attend + m * square, solve + m * square, strength + m * size, across + m * size);
    }
  });
}

template <typename Scalar>
void backward_chunks(const Prepared& in, const Tensor& d_out, const Chunks& chunks, Tensor& state, Tensor& d_state,
                     Gradients& grads) {
  const auto run = run_chunks<Scalar>(in.q, in.k, in.v, in.g, in.beta, chunks, state);
  const auto& [q, k, v, beta, decay, rest, total, pair, kk, inverse] = run.terms;
  const auto d_o = to_chunks<Scalar>(d_out, chunks, 1);
  const auto qk = q.matmul(k.transpose(2, 3)), attend = qk * pair;  // attend: P
  const auto read = scaled(q, decay).transpose(2, 3), taken = scaled(k, decay * beta).transpose(2, 3);
  const auto keys_out = scaled(k, rest);

  // Serial part, backwards: the state's gradient dS, and through it dV' and dR, where V' = M R and R = beta X.
  auto d_written = attend.transpose(2, 3).matmul(d_o);  // dV' [N, H, C, V], from the chunk's own reads
  auto d_rhs = at::empty_like(d_written);               // dR
  auto d_seen = at::empty_like(run.seen);               // dS after each chunk
  for (auto step = chunks.steps() - 1; step >= 0; --step) {
    const auto first = chunks.step_begin[step], count = chunks.step_begin[step + 1] - first;
    const auto of = [&](const Tensor& x) { return x.narrow(0, first, count); };
    auto running = d_state.narrow(0, 0, count);
    of(d_seen).copy_(running);
    add_product(of(d_written), of(keys_out), running);
    of(d_rhs).copy_(of(inverse).transpose(2, 3).matmul(of(d_written)));
    running.mul_(of(total));
    add_product(running, of(read), of(d_o));
    running.sub_(of(taken).matmul(of(d_rhs)));
  }

  // All chunks at once.
  const auto predicted = scaled(k.matmul(run.seen), decay);  // D K S
  auto d_attend = d_o.matmul(run.written.transpose(2, 3)), d_kk = d_rhs.matmul(run.written.transpose(2, 3));
  auto d_beta = row_dots(d_rhs, v - predicted), crossing = at::empty_like(d_beta);
  through_pairs<Scalar>(run.terms, qk, d_attend, d_kk, d_beta, crossing);
  const auto from_read = scaled(d_o.matmul(run.seen.transpose(2, 3)), decay);
  const auto d_q = from_read + d_attend.matmul(k);
  const auto d_predicted = scaled(d_rhs, beta);  // also dV; -d(D K S)
  const auto from_predicted = scaled(d_predicted.matmul(run.seen.transpose(2, 3)), decay);
  const auto from_write = scaled(run.written.matmul(d_seen.transpose(2, 3)), rest);
  auto d_k = d_attend.transpose(2, 3).matmul(q) - from_predicted + from_write;
  d_k.add_((d_kk + d_kk.transpose(2, 3)).matmul(k));

  // g_t decays whatever crosses from before t to t or later: the incoming state to reads, predictions and the outgoing
  // state, and each pair (i, j) with i >= t > j. Only such terms are added, so none cancel and a tiny gradient keeps
  // its digits; differences of sums over all pairs would not.
  auto d_g = row_dots(from_read, q) - row_dots(d_predicted, predicted);
  d_g.narrow(2, chunks.size - 1, 1).add_((d_seen * run.seen).sum({2, 3}, true).mul_(total));
  const auto writes = row_dots(from_write, k);
  d_g = suffix_sum(d_g).add_(crossing);
  d_g.narrow(2, 1, chunks.size - 1).add_(writes.narrow(2, 0, chunks.size - 1).cumsum(2));

  const auto repeat = v.size(1) / in.q.size(1);
  from_chunks<Scalar>(d_q, chunks, repeat, grads.q);
  from_chunks<Scalar>(d_k, chunks, repeat, grads.k);
  from_chunks<Scalar>(d_predicted, chunks, 1, grads.v);
  auto rows_g = grads.g.unsqueeze(2), rows_beta = grads.beta.unsqueeze(2);
  from_chunks<Scalar>(d_g, chunks, 1, rows_g);
  from_chunks<Scalar>(d_beta, chunks, 1, rows_beta);
}

// Through y = scale x / |x|: the part along y vanishes.
Tensor through_l2norm(const Tensor& grad, const Tensor& unit, const Tensor& inverse_norm) {
  return scaled(grad - scaled(unit, row_dots(grad, unit)), inverse_norm);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_cpu(
    const Tensor& grad_out, const std::optional<Tensor>& grad_final_state, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
    const std::optional<Tensor>& initial_state, const Tensor& /*checkpoints*/, double scale, bool qk_l2norm) {
  const auto bounds = checked_bounds("gated_delta_rule_backward", cu_seqlens, v.size(0));
  const auto in = prepare(q, k, v, g, beta, scale, qk_l2norm);
  const auto d_out = grad_out.to(in.type);
  Gradients grads{at::empty_like(in.q), at::empty_like(in.k), at::empty_like(in.v), at::empty_like(in.g),
                  at::empty_like(in.beta)};
  const auto state = start_state(initial_state, in, cu_seqlens.size(0) - 1);
  auto d_state = start_state(grad_final_state, in, cu_seqlens.size(0) - 1);
  AT_DISPATCH_FLOATING_TYPES(in.type, "gated_delta_rule_backward", [&] {
    const auto run = [&](const std::vector<std::int64_t>& sequences, std::int64_t size) {
      if (sequences.empty()) return;
      const auto chunks = make_chunks(bounds, sequences, size);
      const auto order = sequence_index(chunks);
      auto start = state.index_select(0, order), d_carried = d_state.index_select(0, order);
      backward_chunks<scalar_t>(in, d_out, chunks, start, d_carried, grads);
      d_state.index_copy_(0, order, d_carried);
    };
    const auto [brief, lengthy] = classify(bounds);
    run(brief, kShort);
    run(lengthy, chunk_size(k.size(2), v.size(2)));
  });
  auto d_q = grads.q * scale, d_k = grads.k;
  if (qk_l2norm) {
    d_q = through_l2norm(d_q, scaled(q.to(in.type).contiguous(), in.q_inverse_norm), in.q_inverse_norm);
    d_k = through_l2norm(d_k, in.k, in.k_inverse_norm);
  }
  return {d_q.to(q.scalar_type()), d_k.to(k.scalar_type()), grads.v.to(v.scalar_type()), grads.g, grads.beta, d_state};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("gated_delta_rule", forward_cpu);
  m.impl("gated_delta_rule_backward", backward_cpu);
}

}  // namespace sluice
