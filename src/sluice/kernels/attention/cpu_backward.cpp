// SPDX-License-Identifier: Apache-2.0
// CPU backward path. A task is one sequence and kv head, whose gradients no other task touches; its queries' heads are
// rows of the same products. With D_i = dO_i . O_i, for a tile of keys and a slab of the rows that see it:
//   P = exp(scale Q K^T - lse)       dV += P^T dO       dP = dO V^T
//   dS = scale P (dP - D)            dK += dS^T Q       dQ += dS K
// Products with P^T and dS^T are done as dV^T = dO^T P and dK^T = Q^T dS: Q and dO are transposed once, not every tile.
// Sums run in one order: over slabs inside a tile, over tiles inside a row. Tasks run side by side when there are
// enough for all threads, else one after another with each product spread over the threads.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "sluice/core/error.h"
#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/attention/sequences.h"
#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/matmul.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kKeys = 256;   // of a tile
constexpr std::int64_t kSlab = 2048;  // rows of a product: P and dP of a tile are then 2 MiB each in float32

// Rows [first_row, first_row + rows) of a task's matrices beside one tile of keys.
struct Slab {
  std::int64_t first_row, rows, keys, visible_to_first, group;  // visible_to_first: keys of the tile that row 0 sees
};

// scores become P and grad_p becomes dS, both written in the dtype of the operands.
template <typename Scalar>
SLUICE_MULTIARCH void softmax_backward_rows(const Slab& slab, std::int64_t begin, std::int64_t end,
                                            const Wide<Scalar>* scores, const Wide<Scalar>* grad_p,
                                            const Wide<Scalar>* lse, const Wide<Scalar>* delta, Wide<Scalar> scale,
                                            Scalar* p, Scalar* grad_scores) {
  using Real = Wide<Scalar>;
  for (auto r = begin; r < end; ++r) {
    const auto first = r * kKeys;
    const auto visible =
        std::clamp<std::int64_t>(slab.visible_to_first + (slab.first_row + r) / slab.group, 0, slab.keys);
    const Real own_lse = lse[r], own_delta = delta[r];
    for (auto j = first; j < first + visible; ++j) {
      const Real below = scores[j] * scale - own_lse;
      const Real probability = exp_nonpositive(below > 0 ? Real(0) : below);  // rounding may put it above
      const Real grad = probability * (grad_p[j] - own_delta) * scale;
      p[j] = narrow<Scalar>(probability);
      grad_scores[j] = narrow<Scalar>(grad);
    }
    std::fill_n(p + first + visible, slab.keys - visible, Scalar(0));
    std::fill_n(grad_scores + first + visible, slab.keys - visible, Scalar(0));
  }
}

// The rows of one kv head: [tokens, group * width] taken out of [T, H * width] and back.
template <typename Scalar>
Tensor take_head(const Tensor& x, const KeyedSequence& s, std::int64_t kv_head, std::int64_t group) {
  const auto width = x.size(2);
  auto out = at::empty({s.q_count * group, width}, x.options());
  const auto* from = x.const_data_ptr<Scalar>() + (s.q_begin * x.size(1) + kv_head * group) * width;
  for (std::int64_t i = 0; i < s.q_count; ++i) {
    std::copy_n(from + i * x.size(1) * width, group * width, out.mutable_data_ptr<Scalar>() + i * group * width);
  }
  return out;
}

template <typename Scalar>
SLUICE_MULTIARCH void put_head(const Wide<Scalar>* from, const KeyedSequence& s, std::int64_t kv_head,
                               std::int64_t group, const Tensor& to) {
  const auto width = to.size(2);
  auto* out = to.mutable_data_ptr<Scalar>() + (s.q_begin * to.size(1) + kv_head * group) * width;
  for (std::int64_t i = 0; i < s.q_count; ++i, out += to.size(1) * width, from += group * width) {
    for (std::int64_t c = 0; c < group * width; ++c) out[c] = narrow<Scalar>(from[c]);
  }
}

// x^T [width, rows] with rows apart by a multiple of 32, which the bfloat16 product reads in place.
Tensor transposed(const Tensor& x) {
  const auto padded = (x.size(0) + 31) / 32 * 32;
  auto out = at::empty({x.size(1), padded}, x.options()).narrow(1, 0, x.size(0));
  out.copy_(x.t());
  return out;
}

struct Gradients {
  Tensor q, k, v;  // dense, as the inputs
};

template <typename Scalar>
struct Backward {
  Tensor q, k, v, grad_out;  // dense
  Tensor lse, delta;         // [Tq, Hq]
  Wide<Scalar> scale;
};

template <typename Scalar>
void backward_head(const Backward<Scalar>& b, const KeyedSequence& s, std::int64_t head, Gradients& grads) {
  using Real = Wide<Scalar>;
  const at::AutoDispatchBelowAutograd below;
  const auto group = b.q.size(1) / b.k.size(1), rows = s.q_count * group;
  const Tensor q = take_head<Scalar>(b.q, s, head, group), grad_out = take_head<Scalar>(b.grad_out, s, head, group);
  const Tensor lse = take_head<Real>(b.lse.unsqueeze(2), s, head, group),
               delta = take_head<Real>(b.delta.unsqueeze(2), s, head, group);
  const auto q_t = transposed(q), grad_out_t = transposed(grad_out);
  const auto wide = lse.options();
  const Tensor grad_q = at::zeros({rows, q.size(1)}, wide);
  const auto slab_rows = std::min(kSlab, rows);
  const Tensor scores = at::empty({slab_rows, kKeys}, wide), grad_p = at::empty({slab_rows, kKeys}, wide);
  const bool in_place = q.scalar_type() == lse.scalar_type();
  const Tensor p = in_place ? scores : at::empty({slab_rows, kKeys}, q.options());
  const Tensor grad_scores = in_place ? grad_p : at::empty({slab_rows, kKeys}, q.options());
  const Tensor grad_k_t = at::empty({q.size(1), kKeys}, wide), grad_v_t = at::empty({grad_out.size(1), kKeys}, wide);

  for (std::int64_t key = 0; key < s.k_count; key += kKeys) {
    const auto keys = std::min(kKeys, s.k_count - key);
    const auto tile = [&](const Tensor& x) { return x.narrow(0, s.k_begin + key, keys).select(1, head); };
    const auto k = tile(b.k), v = tile(b.v);
    const auto first_row = std::max<std::int64_t>(0, s.q_count - s.k_count + key) * group;
    const auto columns = [&](const Tensor& x) { return x.narrow(1, 0, keys); };
    for (auto row = first_row; row < rows; row += kSlab) {
      const Slab slab{.first_row = row,
                      .rows = std::min(kSlab, rows - row),
                      .keys = keys,
                      .visible_to_first = s.k_count - s.q_count + 1 - key,
                      .group = group};
      const auto own = [&](const Tensor& x) { return x.narrow(0, row, slab.rows); };
      const auto own_t = [&](const Tensor& x) { return x.narrow(1, row, slab.rows); };
      const auto part = [&](const Tensor& x) { return columns(x.narrow(0, 0, slab.rows)); };
      matmul_into(part(scores), own(q), k.t(), false);
      matmul_into(part(grad_p), own(grad_out), v.t(), false);
      at::parallel_for(0, slab.rows, rows_per_task(8 * kKeys), [&](std::int64_t begin, std::int64_t end) {
        softmax_backward_rows<Scalar>(slab, begin, end, scores.const_data_ptr<Real>(), grad_p.const_data_ptr<Real>(),
                                      lse.const_data_ptr<Real>() + row, delta.const_data_ptr<Real>() + row, b.scale,
                                      p.mutable_data_ptr<Scalar>(), grad_scores.mutable_data_ptr<Scalar>());
      });
      matmul_into(columns(grad_v_t), own_t(grad_out_t), part(p), row > first_row);
      matmul_into(columns(grad_k_t), own_t(q_t), part(grad_scores), row > first_row);
      matmul_into(own(grad_q), part(grad_scores), k, true);
    }
    if (first_row < rows) {
      tile(grads.k).copy_(columns(grad_k_t).t());
      tile(grads.v).copy_(columns(grad_v_t).t());
    }
  }
  put_head<Scalar>(grad_q.const_data_ptr<Real>(), s, head, group, grads.q);
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                const Tensor& v, const Tensor& out, const Tensor& lse,
                                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                const std::optional<Tensor>& seqused_k, std::int64_t max_seqlen_q,
                                                std::int64_t max_seqlen_k, double scale) {
  const auto sequences = checked_sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k);
  check_apart("attention", sequences);
  Gradients grads{.q = at::empty(q.sizes(), q.options()),
                  .k = at::zeros(k.sizes(), k.options()),
                  .v = at::zeros(v.sizes(), v.options())};
  const auto heads = k.size(1), tasks = static_cast<std::int64_t>(sequences.size()) * heads;
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, q.scalar_type(), "attention_backward", [&] {
    const auto wide = wide_type(q.scalar_type());
    const Backward<scalar_t> b{.q = q.contiguous(),
                               .k = k.contiguous(),
                               .v = v.contiguous(),
                               .grad_out = grad_out.contiguous(),
                               .lse = lse,
                               .delta = (grad_out.to(wide) * out.to(wide)).sum(-1),
                               .scale = static_cast<Wide<scalar_t>>(scale)};
    const auto run = [&](std::int64_t first, std::int64_t last) {
      for (auto i = first; i < last; ++i) backward_head(b, sequences[i / heads], i % heads, grads);
    };
    if (tasks >= at::get_num_threads()) at::parallel_for(0, tasks, 1, run);
    else run(0, tasks);
  });
  return {grads.q, grads.k, grads.v};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) { m.impl("attention_backward", backward_cpu); }

}  // namespace sluice
