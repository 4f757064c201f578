// SPDX-License-Identifier: Apache-2.0
// On CUDA tensors: libtorch's flash attention (Dao 2023, FlashAttention-2) where it can run them, else a plain path
// over tiles of queries. Both are registered here, in the library that needs no CUDA compiler, because libtorch brings
// the kernels.
#include <ATen/Context.h>

#include "sluice/core/error.h"
#include "sluice/core/log.h"
#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/attention/sequences.h"
#include "sluice/kernels/common/tiled_attention.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;

// Empty, or why flash attention cannot run these.
std::string why_not_flash(at::ScalarType dtype, std::int64_t key_dim, std::int64_t value_dim) {
  if (dtype != kBFloat16) return fmt::format("it computes in bfloat16, and q is {}", c10::toString(dtype));
  if (key_dim != value_dim || key_dim % 8 != 0 || key_dim > 256) {
    return fmt::format("it takes one head dim for keys and values, a multiple of 8 up to 256, and these are {} and {}",
                       key_dim, value_dim);
  }
  return "";
}
std::string why_not_flash(const Tensor& q, const Tensor& v) {
  return why_not_flash(q.scalar_type(), q.size(2), v.size(2));
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

// ---- the plain path: tiles of queries

// Each query's later keys.
HiddenKeys causal(const Tensor& q) {
  return [options = q.options().dtype(at::kBool)](const AttentionTile& tile) {
    return at::ones({tile.rows, tile.keys}, options)
        .tril(tile.sequence.k_count - tile.sequence.q_count + tile.first)
        .logical_not_();
  };
}

std::vector<KeyedSequence> sequences_of(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                        const Tensor& cu_seqlens_k, Optional seqused_k, std::int64_t max_seqlen_q,
                                        std::int64_t max_seqlen_k) {
  return checked_sequences(q, k, cu_seqlens_q.cpu(), cu_seqlens_k.cpu(),
                           seqused_k ? std::optional(seqused_k->cpu()) : std::nullopt, max_seqlen_q, max_seqlen_k);
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
    return tiled_attention(sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k), q, k,
                           v, causal(q), scale);
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
    return tiled_attention_backward(
        sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k), grad_out, q, k, v, out,
        lse, causal(q), scale);
  }
  const Deterministic deterministic;
  const auto state = at::empty({2}, q.options().dtype(at::kUInt64)),
             unused = at::empty({}, state.options());  // dropout's
  return at::_flash_attention_backward(
      grad_out, dense_heads(q), dense_heads(k), dense_heads(v), out, lse.t().contiguous(), cu_seqlens_q.contiguous(),
      cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k, /*dropout_p=*/0, /*is_causal=*/true, state, unused, scale);
}

}  // namespace

bool attention_never_waits(at::ScalarType dtype, std::int64_t key_dim, std::int64_t value_dim) {
  return why_not_flash(dtype, key_dim, value_dim).empty();
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("attention", forward_cuda);
  m.impl("attention_backward", backward_cuda);
}

}  // namespace sluice
