// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/block_top_k/block_top_k.h"

#include "sluice/core/error.h"
#include "sluice/kernels/block_top_k/inputs.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                         std::int64_t, double);

Tensor meta(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
            const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale) {
  check_block_top_k(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size, top_k, scale);
  return at::empty_symint({q.sym_size(0), top_k}, q.options().dtype(kInt));
}

}  // namespace

void check_block_top_k(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
                       const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale) {
  constexpr auto op = "block_top_k";
  check_float_type(op, "q", q);
  SLUICE_CHECK(q.dim() == 3 && block_keys.dim() == 2 && block_keys.size(1) == q.size(2) && q.size(2) > 0,
               "{}: q must be [Tq, H, d] and block_keys [B, d]; got q {}, block_keys {}", op, describe(q),
               describe(block_keys));
  SLUICE_CHECK(block_keys.scalar_type() == q.scalar_type(), "{}: q and block_keys must have one dtype; got {} and {}",
               op, describe(q), describe(block_keys));
  check_cu_seqlens(op, cu_seqlens_q);
  check_cu_seqlens(op, cu_blocks);
  SLUICE_CHECK(cu_blocks.size(0) == cu_seqlens_q.size(0),
               "{}: cu_seqlens_q and cu_blocks must name the same sequences; got {} and {} of them", op,
               cu_seqlens_q.size(0) - 1, cu_blocks.size(0) - 1);
  SLUICE_CHECK(seqused_k.dim() == 1 && seqused_k.size(0) == cu_seqlens_q.size(0) - 1 && seqused_k.scalar_type() == kInt,
               "{}: seqused_k must be int32 [N={}]; got {}", op, cu_seqlens_q.size(0) - 1, describe(seqused_k));
  SLUICE_CHECK(block_size >= 1 && top_k >= 1 && scale > 0,
               "{}: block_size and top_k must be at least 1 and scale positive; got {}, {} and {}", op, block_size,
               top_k, scale);
}

std::vector<BlockSequence> block_sequences(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q,
                                           const Tensor& cu_blocks, const Tensor& seqused_k, std::int64_t block_size) {
  const auto q_bounds = checked_bounds("block_top_k, cu_seqlens_q", cu_seqlens_q, q.size(0));
  const auto b_bounds = sequence_bounds(cu_blocks);
  const auto used = seqused_k.contiguous();
  std::vector<BlockSequence> sequences;
  for (std::size_t n = 0; n + 1 < q_bounds.size(); ++n) {
    const std::int64_t keys = used.const_data_ptr<std::int32_t>()[n], begin = b_bounds[n];
    SLUICE_CHECK(
        keys >= 0 && begin >= 0 && begin + keys / block_size <= block_keys.size(0),
        "block_top_k: the {} complete blocks of sequence {}'s {} keys begin at row {} of block_keys, which has "
        "{} rows.\n  They must lie inside it: cu_blocks[{}] + seqused_k[{}] / block_size <= B.",
        keys / block_size, n, keys, begin, block_keys.size(0), n, n);
    sequences.push_back({.q_begin = q_bounds[n],
                         .q_count = q_bounds[n + 1] - q_bounds[n],
                         .block_begin = begin,
                         .key_count = keys,
                         .block_size = block_size});
  }
  return sequences;
}

Tensor block_top_k(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
                   const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale) {
  static const auto op = registered_operator<Signature>("sluice::block_top_k");
  return op.call(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size, top_k, scale);
}

// The overload is the kernel of the CUDA library, where it is loaded (gpu.cpp).
TORCH_LIBRARY_FRAGMENT(sluice, m) {
  for (const std::string overload : {"", ".sm90"}) {
    const auto schema = "block_top_k" + overload +
                        "(Tensor q, Tensor block_keys, Tensor cu_seqlens_q, Tensor cu_blocks, Tensor seqused_k, int "
                        "block_size, int top_k, float scale) -> Tensor";
    m.def(schema.c_str());
  }
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) { m.impl("block_top_k", meta); }
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("block_top_k", torch::CppFunction::makeFallthrough()); }

}  // namespace sluice
