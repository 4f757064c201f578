// SPDX-License-Identifier: Apache-2.0
// On CUDA tensors: the kernels of the CUDA library (cuda.cpp) where they can run these, else a plain path: tiles of
// queries in ATen, with a mask that the choice of blocks is spread to. That computes every score, so a long sequence
// costs what dense attention costs without a fused kernel; memory is bounded by the tile.
#include "sluice/core/log.h"
#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/signatures.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/tiled_attention.h"

namespace sluice {
namespace {

using block_sparse::Backward, block_sparse::Forward, block_sparse::Optional;

// Empty, or why the kernels cannot run these.
std::string why_plain(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t block_size, double scale,
                      bool loaded) {
  if (!loaded) return "libsluice_cuda.so is not loaded";
  if (q.scalar_type() != kBFloat16) return fmt::format("the kernels compute in bfloat16, and q is {}", describe(q));
  if (q.size(2) != v.size(2) || (q.size(2) != 128 && q.size(2) != 256)) {
    return fmt::format("the kernels take one head dim for keys and values, 128 or 256; these are {} and {}", q.size(2),
                       v.size(2));
  }
  if (block_size != 4) return fmt::format("the kernels take blocks of 4 keys; these are of {}", block_size);
  if (q.size(1) / k.size(1) > 48) {
    return fmt::format("the kernels take at most 48 query heads a kv head; these are {}", q.size(1) / k.size(1));
  }
  if (scale <= 0) return fmt::format("the kernels take a positive scale; this is {}", scale);
  return "";
}

// All but the keys of the blocks that are chosen for a query, and of its open tail.
HiddenKeys outside(const Tensor& blocks, std::int64_t block_size) {
  return [=](const AttentionTile& tile) {
    const auto& s = tile.sequence;
    const auto complete = tile.keys / block_size;
    const auto chosen = blocks.narrow(0, s.q_begin + tile.first, tile.rows).to(kLong);
    auto hidden = at::ones({tile.rows, complete + 1}, chosen.options().dtype(at::kBool));  // the last: where -1 goes
    hidden.scatter_(1, chosen.masked_fill(chosen < 0, complete), false);
    hidden.select(1, complete).fill_(true);
    const auto keys = hidden.repeat_interleave(block_size, 1).narrow(1, 0, tile.keys);
    const auto key = at::arange(tile.keys, chosen.options());
    const auto visible = (at::arange(tile.rows, chosen.options()) + (s.k_count - s.q_count + tile.first + 1))
                             .clamp_min(0)
                             .unsqueeze(1);  // [rows, 1]
    const auto tail = (key >= visible.div(block_size, "floor") * block_size) & (key < visible);
    return keys.logical_and(tail.logical_not());
  };
}

std::vector<KeyedSequence> sequences_of(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                        const Tensor& cu_seqlens_k, Optional seqused_k) {
  return keyed_sequences("block_sparse_attention", q, k, cu_seqlens_q.cpu(), cu_seqlens_k.cpu(),
                         seqused_k ? std::optional(seqused_k->cpu()) : std::nullopt);
}

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                        std::int64_t block_size, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                        Optional seqused_k, double scale) {
  static const auto op = registered_operator<Forward>("sluice::block_sparse_attention", "sm90");
  const bool loaded = op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  if (const auto reason = why_plain(q, k, v, block_size, scale, loaded); reason.empty()) {
    return op.call(q, k, v, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k, scale);
  } else {
    log_once("block_sparse_attention: a plain path, many times slower than the kernels: {}", reason);
  }
  return tiled_attention(sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k), q, k, v,
                         outside(blocks, block_size), scale);
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                 const Tensor& v, const Tensor& out, const Tensor& lse,
                                                 const Tensor& blocks, std::int64_t block_size,
                                                 const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                 Optional seqused_k, double scale) {
  static const auto op = registered_operator<Backward>("sluice::block_sparse_attention_backward", "sm90");
  const bool loaded = op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  if (const auto reason = why_plain(q, k, v, block_size, scale, loaded); reason.empty()) {
    return op.call(grad_out, q, k, v, out, lse, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k, scale);
  } else {
    log_once("block_sparse_attention: a plain path backward, many times slower than the kernels: {}", reason);
  }
  const auto sequences = sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k);
  check_apart("block_sparse_attention", sequences);
  return tiled_attention_backward(sequences, grad_out, q, k, v, out, lse, outside(blocks, block_size), scale);
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("block_sparse_attention", forward_cuda);
  m.impl("block_sparse_attention_backward", backward_cuda);
}

}  // namespace sluice
