// SPDX-License-Identifier: Apache-2.0
// On CUDA tensors: libtorch's flash attention (Dao 2023, FlashAttention-2) where it can run them, else a plain path
// over tiles of queries. Both are registered here, in the library that needs no CUDA compiler, because libtorch brings
// the kernels.
#include <ATen/Context.h>

#include <functional>
#include <limits>

#include "sluice/core/error.h"
#include "sluice/core/log.h"
#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/attention/sequences.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;

// Empty, or why flash attention cannot run these.
std::string why_not_flash(const Tensor& q, const Tensor& v) {
  if (q.scalar_type() != kBFloat16) return fmt::format("it computes in bfloat16, and q is {}", describe(q));
  if (q.size(2) != v.size(2) || q.size(2) % 8 != 0 || q.size(2) > 256) {
    return fmt::format("it takes one head dim for keys and values, a multiple of 8 up to 256, and these are {} and {}",
                       q.size(2), v.size(2));
  }
  return "";
}

Tensor dense_heads(const Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

// Flash attention's backward pass adds up dq in a fixed order only while libtorch is told to be deterministic; that
// would also fill fresh memory, which costs time and protects nobody here.
class Deterministic {
 public:
  Deterministic() {
    context_.setDeterministicAlgorithms(true, /*warn_only=*/false);
    context_.setDeterministicFillUninitializedMemory(false);
  }
  ~Deterministic() {
    context_.setDeterministicAlgorithms(before_, warned_only_);
    context_.setDeterministicFillUninitializedMemory(filled_);
  }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;

 private:
  at::Context& context_ = at::globalContext();
  bool before_ = context_.deterministicAlgorithms(), warned_only_ = context_.deterministicAlgorithmsWarnOnly(),
       filled_ = context_.deterministicFillUninitializedMemory();
};

// ---- the plain path: for each sequence and kKeptRows of its queries, all scores [Hkv, group * rows, keys] at once

constexpr std::int64_t kKeptRows = 512;

// x [rows, Hkv * group, d] as [Hkv, group * rows, d] in the accumulation type.
Tensor by_kv_head(const Tensor& x, std::int64_t kv_heads) {
  const auto wide = x.to(wide_type(x.scalar_type()));
  return wide.view({x.size(0), kv_heads, -1, x.size(2)}).permute({1, 2, 0, 3}).reshape({kv_heads, -1, x.size(2)});
}

Tensor from_kv_head(const Tensor& x, std::int64_t rows) {  // and back
  return x.view({x.size(0), -1, rows, x.size(2)}).permute({2, 0, 1, 3}).reshape({rows, -1, x.size(2)});
}

// One tile: queries [first, first + rows) of a sequence. Its keys and values are [Hkv, keys, d].
struct Tile {
  KeyedSequence sequence;
  std::int64_t first, rows;
  Tensor k, v;

  Tensor rows_of(const Tensor& x) const { return x.narrow(0, sequence.q_begin + first, rows); }

  // [Hkv, group * rows, keys]; -infinity where a query does not see the key.
  Tensor scores(const Tensor& q, double scale) const {
    const auto all = by_kv_head(rows_of(q), k.size(0)).matmul(k.transpose(1, 2)) * scale;
    const auto hidden = at::ones({rows, k.size(1)}, all.options().dtype(at::kBool))
                            .tril(sequence.k_count - sequence.q_count + first)
                            .logical_not_();
    return all.view({k.size(0), q.size(1) / k.size(0), rows, k.size(1)})
        .masked_fill(hidden, -std::numeric_limits<double>::infinity())
        .view(all.sizes());
  }
};

void for_each_tile(const std::vector<KeyedSequence>& sequences, const Tensor& k, const Tensor& v,
                   const std::function<void(const Tile&)>& function) {
  const auto wide = wide_type(k.scalar_type());
  for (const auto& s : sequences) {
    const auto own = [&](const Tensor& x) { return x.narrow(0, s.k_begin, s.k_count).to(wide).transpose(0, 1); };
    for (std::int64_t first = 0; first < s.q_count; first += kKeptRows) {
      function(
          {.sequence = s, .first = first, .rows = std::min(kKeptRows, s.q_count - first), .k = own(k), .v = own(v)});
    }
  }
}

std::vector<KeyedSequence> sequences_of(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                        const Tensor& cu_seqlens_k, Optional seqused_k, std::int64_t max_seqlen_q,
                                        std::int64_t max_seqlen_k) {
  return checked_sequences(q, k, cu_seqlens_q.cpu(), cu_seqlens_k.cpu(),
                           seqused_k ? std::optional(seqused_k->cpu()) : std::nullopt, max_seqlen_q, max_seqlen_k);
}

std::tuple<Tensor, Tensor> plain_forward(const std::vector<KeyedSequence>& sequences, const Tensor& q, const Tensor& k,
                                         const Tensor& v, double scale) {
  auto out = at::zeros({q.size(0), q.size(1), v.size(2)}, q.options());
  auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(wide_type(q.scalar_type())));
  for_each_tile(sequences, k, v, [&](const Tile& tile) {
    const auto scores = tile.scores(q, scale);
    const auto own_lse = scores.logsumexp(-1, /*keepdim=*/true);  // [Hkv, group * rows, 1]; -infinity: no key seen
    const auto p = (scores - own_lse.masked_fill(own_lse.isneginf(), 0)).exp();
    tile.rows_of(out).copy_(from_kv_head(p.matmul(tile.v), tile.rows));
    tile.rows_of(lse).copy_(from_kv_head(own_lse, tile.rows).squeeze(-1));
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> plain_backward(const std::vector<KeyedSequence>& sequences, const Tensor& grad_out,
                                                  const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                                  const Tensor& lse, double scale) {
  const auto wide = wide_type(q.scalar_type());
  auto dq = at::empty(q.sizes(), q.options());
  auto dk = at::zeros(k.sizes(), k.options().dtype(wide)), dv = at::zeros(v.sizes(), v.options().dtype(wide));
  const auto delta = (grad_out.to(wide) * out.to(wide)).sum(-1, /*keepdim=*/true);  // [Tq, Hq, 1]
  for_each_tile(sequences, k, v, [&](const Tile& tile) {
    const auto heads = k.size(1);
    const auto scores = tile.scores(q, scale);
    const auto p =
        (scores - by_kv_head(tile.rows_of(lse).unsqueeze(-1), heads)).exp().masked_fill(scores.isneginf(), 0);
    const auto d_out = by_kv_head(tile.rows_of(grad_out), heads);
    const auto d_scores = p * (d_out.matmul(tile.v.transpose(1, 2)) - by_kv_head(tile.rows_of(delta), heads)) * scale;
    const auto keys = [&](const Tensor& x) { return x.narrow(0, tile.sequence.k_begin, tile.sequence.k_count); };
    tile.rows_of(dq).copy_(from_kv_head(d_scores.matmul(tile.k), tile.rows));
    keys(dk).add_(d_scores.transpose(1, 2).matmul(by_kv_head(tile.rows_of(q), heads)).transpose(0, 1));
    keys(dv).add_(p.transpose(1, 2).matmul(d_out).transpose(0, 1));
  });
  return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

// ----

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                        const Tensor& cu_seqlens_k, Optional seqused_k, std::int64_t max_seqlen_q,
                                        std::int64_t max_seqlen_k, double scale) {
  const at::AutoDispatchBelowAutograd below;
  if (q.size(0) == 0) {
    return {at::empty({0, q.size(1), v.size(2)}, q.options()), at::empty({0, q.size(1)}, q.options().dtype(kFloat))};
  }
  if (const auto reason = why_not_flash(q, v); !reason.empty()) {
    log_once("attention: a plain path, many times slower than flash attention: {}", reason);
    return plain_forward(sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k), q, k, v,
                         scale);
  }
  auto [out, lse, rng_state, unused, mask] = at::_flash_attention_forward(
      dense_heads(q), dense_heads(k), dense_heads(v), cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(),
      max_seqlen_q, max_seqlen_k, /*dropout_p=*/0, /*is_causal=*/true, /*return_debug_mask=*/false, scale, std::nullopt,
      std::nullopt, seqused_k ? std::optional(seqused_k->contiguous()) : std::nullopt);
  return {out, lse.t()};  // [Hq, Tq] as it lies
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                 const Tensor& v, const Tensor& out, const Tensor& lse,
                                                 const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                 Optional seqused_k, std::int64_t max_seqlen_q,
                                                 std::int64_t max_seqlen_k, double scale) {
  const at::AutoDispatchBelowAutograd below;
  if (q.size(0) == 0) return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
  auto reason = why_not_flash(q, v);
  if (seqused_k) reason = "its backward pass knows no cache with gaps";
  if (!reason.empty()) {
    log_once("attention: a plain path backward, many times slower than flash attention: {}", reason);
    return plain_backward(sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k),
                          grad_out, q, k, v, out, lse, scale);
  }
  const Deterministic deterministic;
  const auto state = at::empty({2}, q.options().dtype(at::kUInt64)),
             unused = at::empty({}, state.options());  // dropout's
  return at::_flash_attention_backward(
      grad_out, dense_heads(q), dense_heads(k), dense_heads(v), out, lse.t().contiguous(), cu_seqlens_q.contiguous(),
      cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k, /*dropout_p=*/0, /*is_causal=*/true, state, unused, scale);
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("attention", forward_cuda);
  m.impl("attention_backward", backward_cuda);
}

}  // namespace sluice
