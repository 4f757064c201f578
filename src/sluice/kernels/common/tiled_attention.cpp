// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/tiled_attention.h"

#include <limits>

#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kScores = std::int64_t{1} << 26, kMostRows = 512;  // of a tile, over all heads

// a b per head, in the wide type.
Tensor product(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == kBFloat16 && a.is_cuda()) return at::bmm(a, b, kFloat);
  const auto wide = wide_type(a.scalar_type());
  return a.to(wide).bmm(b.to(wide));
}

// x [rows, Hkv * group, d] as [Hkv, group * rows, d].
Tensor by_kv_head(const Tensor& x, std::int64_t kv_heads) {
  const auto rows = x.size(0), width = x.size(2);
  return x.reshape({rows, kv_heads, -1, width}).permute({1, 2, 0, 3}).reshape({kv_heads, -1, width});
}

Tensor from_kv_head(const Tensor& x, std::int64_t rows) {  // and back
  return x.view({x.size(0), -1, rows, x.size(2)}).permute({2, 0, 1, 3}).reshape({rows, -1, x.size(2)});
}

// The operands of one tile, and its scores [Hkv, group * rows, keys]; -infinity where a query does not attend.
struct Operands {
  const AttentionTile& tile;
  Tensor k, v;  // [Hkv, keys, d], [Hkv, keys, dv]

  Operands(const AttentionTile& t, const Tensor& all_k, const Tensor& all_v)
      : tile(t), k(of_keys(all_k).transpose(0, 1)), v(of_keys(all_v).transpose(0, 1)) {}
  Tensor of_keys(const Tensor& x) const { return x.narrow(0, tile.sequence.k_begin, tile.keys); }
  Tensor of_rows(const Tensor& x) const { return x.narrow(0, tile.sequence.q_begin + tile.first, tile.rows); }
  Tensor by_head(const Tensor& x) const { return by_kv_head(of_rows(x), k.size(0)); }

  Tensor scores(const Tensor& q, const HiddenKeys& hidden, double scale) const {
    auto all = product(by_head(q), k.transpose(1, 2)).mul_(scale);
    all.view({k.size(0), -1, tile.rows, tile.keys})
        .masked_fill_(hidden(tile), -std::numeric_limits<double>::infinity());
    return all;
  }
};

void for_each_tile(const std::vector<KeyedSequence>& sequences, const Tensor& q, const Tensor& k, const Tensor& v,
                   const std::function<void(const Operands&)>& function) {
  for (const auto& s : sequences) {
    const auto most =
        std::clamp(kScores / std::max<std::int64_t>(1, q.size(1) * s.k_count), std::int64_t{16}, kMostRows);
    for (std::int64_t first = 0; first < s.q_count; first += most) {
      const auto rows = std::min(most, s.q_count - first);
      const AttentionTile tile{.sequence = s, .first = first, .rows = rows, .keys = s.visible(first + rows - 1)};
      if (tile.keys > 0) function(Operands(tile, k, v));
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor> tiled_attention(const std::vector<KeyedSequence>& sequences, const Tensor& q,
                                           const Tensor& k, const Tensor& v, const HiddenKeys& hidden, double scale) {
  auto out = at::zeros({q.size(0), q.size(1), v.size(2)}, q.options());
  auto lse = at::full({q.size(0), q.size(1)}, -std::numeric_limits<double>::infinity(),
                      q.options().dtype(wide_type(q.scalar_type())));
  for_each_tile(sequences, q, k, v, [&](const Operands& x) {
    auto scores = x.scores(q, hidden, scale);
    const auto own = scores.logsumexp(-1, /*keepdim=*/true);  // [Hkv, group * rows, 1]
    const auto p = scores.sub_(own.masked_fill(own.isneginf(), 0)).exp_();
    x.of_rows(out).copy_(from_kv_head(product(p.to(v.scalar_type()), x.v), x.tile.rows));
    x.of_rows(lse).copy_(from_kv_head(own, x.tile.rows).squeeze(-1));
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> tiled_attention_backward(const std::vector<KeyedSequence>& sequences,
                                                            const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor& out, const Tensor& lse,
                                                            const HiddenKeys& hidden, double scale) {
  const auto type = q.scalar_type(), wide = wide_type(type);
  auto dq = at::zeros(q.sizes(), q.options());
  auto dk = at::zeros(k.sizes(), k.options().dtype(wide)), dv = at::zeros(v.sizes(), v.options().dtype(wide));
  const auto delta = (grad_out.to(wide) * out.to(wide)).sum(-1, /*keepdim=*/true);  // [Tq, Hq, 1]
  const auto denominator = lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1);
  for_each_tile(sequences, q, k, v, [&](const Operands& x) {
    const auto p = x.scores(q, hidden, scale).sub_(x.by_head(denominator)).exp_();
    const auto d_out = x.by_head(grad_out);
    const auto d_scores = product(d_out, x.v.transpose(1, 2)).sub_(x.by_head(delta)).mul_(p).mul_(scale).to(type);
    x.of_rows(dq).copy_(from_kv_head(product(d_scores, x.k), x.tile.rows));
    x.of_keys(dk).add_(product(d_scores.transpose(1, 2), x.by_head(q)).transpose(0, 1));
    x.of_keys(dv).add_(product(p.to(type).transpose(1, 2), d_out).transpose(0, 1));
  });
  return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

}  // namespace sluice
