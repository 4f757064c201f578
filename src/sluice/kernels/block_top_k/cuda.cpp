// SPDX-License-Identifier: Apache-2.0
// The choice of blocks on CUDA tensors: from tensors to params to launch.
#include "sluice/kernels/block_top_k/params.h"
#include "sluice/kernels/common/launch.h"

namespace sluice {
namespace {

constexpr auto kOp = "block_top_k";

// [B, d] without gaps between rows, which start at multiples of 16 bytes.
Tensor dense_rows(const Tensor& x) {
  const bool dense = x.is_contiguous() && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return dense ? x : x.clone(at::MemoryFormat::Contiguous);
}

Tensor block_top_k_cuda(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
                        const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale) {
  const c10::cuda::CUDAGuard device(q.device());
  const auto chosen = at::empty({q.size(0), top_k}, q.options().dtype(kInt));
  if (q.size(0) == 0) return chosen;
  check_device(kOp, "block_keys", block_keys, q);
  check_device(kOp, "cu_seqlens_q", cu_seqlens_q, q);
  check_device(kOp, "cu_blocks", cu_blocks, q);
  check_device(kOp, "seqused_k", seqused_k, q);
  SLUICE_CHECK(cu_seqlens_q.numel() > 1, "{}: q {} has tokens, cu_seqlens_q no sequence", kOp, describe(q));
  const auto rows = dense_heads(q), keys = dense_rows(block_keys);
  const auto q_bounds = cu_seqlens_q.contiguous(), b_bounds = cu_blocks.contiguous(), used = seqused_k.contiguous();
  BlockTopKParams params{};
  params.q = bf16_data(rows);
  params.block_keys = bf16_data(keys);
  params.cu_seqlens_q = q_bounds.const_data_ptr<std::int32_t>();
  params.cu_blocks = b_bounds.const_data_ptr<std::int32_t>();
  params.seqused_k = used.const_data_ptr<std::int32_t>();
  params.q_tokens = static_cast<std::int32_t>(q.size(0));
  params.block_rows = static_cast<std::int32_t>(block_keys.size(0));
  params.sequences = static_cast<std::int32_t>(cu_seqlens_q.numel() - 1);
  params.heads = static_cast<std::int32_t>(q.size(1));
  params.dim = static_cast<std::int32_t>(q.size(2));
  params.block_size = static_cast<std::int32_t>(block_size);
  params.top_k = static_cast<std::int32_t>(top_k);
  params.q_stride = rows.stride(0);
  params.scale = static_cast<float>(scale);
  params.chosen = chosen.mutable_data_ptr<std::int32_t>();
  check_launch(kOp, launch_block_top_k(params, c10::cuda::getCurrentCUDAStream()));
  return chosen;
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) { m.impl("block_top_k.sm90", block_top_k_cuda); }

}  // namespace
}  // namespace sluice
