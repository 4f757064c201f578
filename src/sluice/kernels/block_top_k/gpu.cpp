// SPDX-License-Identifier: Apache-2.0
// On CUDA tensors: the kernel of the CUDA library (cuda.cpp) where it can run these, else a plain path: tiles of
// queries in ATen. There a score and its block make one 64-bit number, so that no two are equal and the order of equal
// scores is the one promised; the bits of a score may depend on the tile's shape, by which the library chooses its
// product.
#include "sluice/core/error.h"
#include "sluice/core/log.h"
#include "sluice/kernels/block_top_k/block_top_k.h"
#include "sluice/kernels/block_top_k/inputs.h"
#include "sluice/kernels/common/operator.h"

namespace sluice {
namespace {

using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                         std::int64_t, double);

constexpr std::int64_t kMostBlocks = std::int64_t{55} * 1024;  // of a sequence, for the kernel: params.h

// Empty, or why the kernel cannot run these. It waits for the device where a sequence might be too long.
std::string why_plain(const Tensor& q, const Tensor& block_keys, const Tensor& seqused_k, std::int64_t block_size,
                      bool loaded) {
  const auto heads = q.size(1), dim = q.size(2);
  if (!loaded) return "libsluice_cuda.so is not loaded";
  if (q.scalar_type() != kBFloat16) return fmt::format("the kernel computes in bfloat16, and q is {}", describe(q));
  if (dim != 32 && dim != 64 && dim != 128) return fmt::format("the kernel takes dims 32, 64 and 128; this is {}", dim);
  if (heads > 8 || (heads & (heads - 1)) != 0) return fmt::format("the kernel takes 1, 2, 4 or 8 heads, not {}", heads);
  if (block_keys.size(0) > kMostBlocks && seqused_k.numel() > 0) {
    const auto blocks = seqused_k.max().item<std::int64_t>() / block_size;
    if (blocks > kMostBlocks) {
      return fmt::format("the kernel takes sequences of at most {} blocks; one has {}", kMostBlocks, blocks);
    }
  }
  return "";
}

constexpr std::int64_t kProducts = std::int64_t{1} << 26;  // held at once, over all heads

// a b in float32.
Tensor product(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == kBFloat16 ? at::mm(a, b, kFloat) : a.mm(b);
}

// The choice [rows, top_k] of queries [first, first + rows) of a sequence; q [rows, H, d].
Tensor choose(const BlockSequence& s, std::int64_t first, const Tensor& q, const Tensor& block_keys, std::int64_t top_k,
              double scale) {
  const auto rows = q.size(0), most = s.blocks(first + rows - 1), none = s.key_count;
  auto chosen = at::full({rows, top_k}, -1, q.options().dtype(kInt));
  if (most == 0) return chosen;
  const auto products = product(q.reshape({-1, q.size(2)}), block_keys.narrow(0, s.block_begin, most).t());
  const auto scores = products.relu_().nan_to_num_(0).view({rows, -1, most}).sum(1) * scale;  // [rows, most]
  const auto block = at::arange(most, q.options().dtype(kLong));
  const auto seen = at::arange(rows, block.options()) + (s.key_count - s.q_count + first + 1);  // keys of each query
  const auto complete = seen.clamp_min(0).div(s.block_size, "floor").unsqueeze(1);              // [rows, 1]
  // Bits of floats that are not negative rise with them.
  auto keys = scores.view(kInt).to(kLong).mul_(std::int64_t{1} << 32).add_(none - block);
  keys.masked_fill_(block >= complete, -1);
  const auto taken = std::min(top_k, most);
  const auto [best, index] = keys.topk(taken, 1, /*largest=*/true, /*sorted=*/false);
  const auto rising = std::get<0>(index.masked_fill(best < 0, none).sort(1));
  chosen.narrow(1, 0, taken).copy_(rising.masked_fill(rising == none, -1));
  return chosen;
}

Tensor block_top_k_cuda(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
                        const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale) {
  check_block_top_k(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size, top_k, scale);
  static const auto op = registered_operator<Signature>("sluice::block_top_k", "sm90");
  const bool loaded = op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  if (const auto reason = why_plain(q, block_keys, seqused_k, block_size, loaded); reason.empty()) {
    return op.call(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size, top_k, scale);
  } else {
    log_once("block_top_k: a plain path, many times slower than the kernel: {}", reason);
  }
  SLUICE_CHECK(q.scalar_type() != kDouble, "block_top_k: on a GPU q must be float32 or bfloat16; got {}", describe(q));
  auto result = at::empty({q.size(0), top_k}, q.options().dtype(kInt));
  for (const auto& s :
       block_sequences(q, block_keys, cu_seqlens_q.cpu(), cu_blocks.cpu(), seqused_k.cpu(), block_size)) {
    const auto blocks = std::max<std::int64_t>(1, s.key_count / block_size);
    const auto most = std::max<std::int64_t>(1, kProducts / (q.size(1) * blocks));
    for (std::int64_t first = 0; first < s.q_count; first += most) {
      const auto rows = std::min(most, s.q_count - first);
      const auto own = q.narrow(0, s.q_begin + first, rows);
      result.narrow(0, s.q_begin + first, rows).copy_(choose(s, first, own, block_keys, top_k, scale));
    }
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CUDA, m) { m.impl("block_top_k", block_top_k_cuda); }

}  // namespace sluice
