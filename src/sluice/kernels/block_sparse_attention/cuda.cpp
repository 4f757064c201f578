// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention on CUDA tensors: from tensors to params to launch.
#include <cstdint>
#include <tuple>

#include "sluice/kernels/block_sparse_attention/params.h"
#include "sluice/kernels/common/launch.h"

namespace sluice {
namespace {

constexpr auto kOp = "block_sparse_attention";

using Optional = const std::optional<Tensor>&;

// What the params point into: inputs in the layout that the kernels read. Held until the launch.
struct Inputs {
  Tensor q, k, v, blocks, cu_seqlens_q, cu_seqlens_k, seqused_k;
};

Inputs make_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks, const Tensor& cu_seqlens_q,
                   const Tensor& cu_seqlens_k, Optional seqused_k) {
  check_device(kOp, "k", k, q);
  check_device(kOp, "v", v, q);
  check_device(kOp, "blocks", blocks, q);
  check_device(kOp, "cu_seqlens_q", cu_seqlens_q, q);
  check_device(kOp, "cu_seqlens_k", cu_seqlens_k, q);
  if (seqused_k) check_device(kOp, "seqused_k", *seqused_k, q);
  // Queries have int32 places in the pack; rows are found by an uint32 of pieces of 16 bytes.
  const auto too_long = [](const Tensor& x) {
    return x.size(0) > (1 << 24) || x.size(0) * x.stride(0) / 8 >= 1LL << 32;
  };
  SLUICE_CHECK(!too_long(q) && !too_long(k) && !too_long(v),
               "{}: at most 16,777,216 tokens, and 64 GiB from a tensor's first to its last; got q {}, k {}, v {}", kOp,
               describe(q), describe(k), describe(v));
  SLUICE_CHECK(cu_seqlens_q.numel() > 1, "{}: q {} has tokens, cu_seqlens_q no sequence", kOp, describe(q));
  return {dense_heads(q),
          dense_heads(k),
          dense_heads(v),
          blocks.contiguous(),
          cu_seqlens_q.contiguous(),
          cu_seqlens_k.contiguous(),
          seqused_k ? seqused_k->contiguous() : Tensor()};
}

BlockSparseAttentionParams make_params(const Inputs& x, double scale) {
  BlockSparseAttentionParams params{};
  params.q = bf16_data(x.q);
  params.k = bf16_data(x.k);
  params.v = bf16_data(x.v);
  params.blocks = x.blocks.const_data_ptr<std::int32_t>();
  params.cu_seqlens_q = x.cu_seqlens_q.const_data_ptr<std::int32_t>();
  params.cu_seqlens_k = x.cu_seqlens_k.const_data_ptr<std::int32_t>();
  params.seqused_k = x.seqused_k.defined() ? x.seqused_k.const_data_ptr<std::int32_t>() : nullptr;
  params.q_tokens = static_cast<std::int32_t>(x.q.size(0));
  params.k_tokens = static_cast<std::int32_t>(x.k.size(0));
  params.sequences = static_cast<std::int32_t>(x.cu_seqlens_q.numel() - 1);
  params.heads = static_cast<std::int32_t>(x.q.size(1));
  params.kv_heads = static_cast<std::int32_t>(x.k.size(1));
  params.dim = static_cast<std::int32_t>(x.q.size(2));
  params.top_k = static_cast<std::int32_t>(x.blocks.size(1));
  params.q_stride = x.q.stride(0);
  params.k_stride = x.k.stride(0);
  params.v_stride = x.v.stride(0);
  params.scale = static_cast<float>(scale);
  return params;
}

Tensor workspace(size_t bytes, const Tensor& like) {
  return at::empty({static_cast<std::int64_t>(bytes)}, like.options().dtype(at::kByte));
}

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                        std::int64_t, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                        Optional seqused_k, double scale) {
  const c10::cuda::CUDAGuard device(q.device());
  const auto out = at::empty(q.sizes(), q.options());
  const auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(kFloat));
  if (q.size(0) == 0) return {out, lse};
  const Inputs inputs = make_inputs(q, k, v, blocks, cu_seqlens_q, cu_seqlens_k, seqused_k);
  auto params = make_params(inputs, scale);
  params.out = mutable_bf16_data(out);
  params.lse = lse.mutable_data_ptr<float>();
  const auto scratch = workspace(block_sparse_attention_workspace_bytes(params), q);
  params.workspace = scratch.mutable_data_ptr();
  check_launch(kOp, launch_block_sparse_attention_sm90(params, c10::cuda::getCurrentCUDAStream()));
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                 const Tensor& v, const Tensor& out, const Tensor& lse,
                                                 const Tensor& blocks, std::int64_t, const Tensor& cu_seqlens_q,
                                                 const Tensor& cu_seqlens_k, Optional seqused_k, double scale) {
  const c10::cuda::CUDAGuard device(q.device());
  // With seqused_k there may be rows that are no key.
  const auto like_keys = [&](const Tensor& x) {
    return q.size(0) == 0 || seqused_k ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
  };
  const auto grad_q = at::empty(q.sizes(), q.options()), grad_k = like_keys(k), grad_v = like_keys(v);
  if (q.size(0) == 0) return {grad_q, grad_k, grad_v};
  const Inputs inputs = make_inputs(q, k, v, blocks, cu_seqlens_q, cu_seqlens_k, seqused_k);
  const auto dense_out = out.contiguous(), dense_lse = lse.contiguous(), dense_grad = dense_heads(grad_out);
  BlockSparseAttentionBackwardParams params{};
  params.forward = make_params(inputs, scale);
  params.forward.out = const_cast<__nv_bfloat16*>(bf16_data(dense_out));       // only read
  params.forward.lse = const_cast<float*>(dense_lse.const_data_ptr<float>());  // likewise
  params.grad_out = bf16_data(dense_grad);
  params.grad_out_stride = dense_grad.stride(0);
  params.grad_q = mutable_bf16_data(grad_q);
  params.grad_k = mutable_bf16_data(grad_k);
  params.grad_v = mutable_bf16_data(grad_v);
  const auto scratch = workspace(block_sparse_attention_backward_workspace_bytes(params.forward), q);
  params.forward.workspace = scratch.mutable_data_ptr();
  check_launch(kOp, launch_block_sparse_attention_backward_sm90(params, c10::cuda::getCurrentCUDAStream()));
  return {grad_q, grad_k, grad_v};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("block_sparse_attention.sm90", forward_cuda);
  m.impl("block_sparse_attention_backward.sm90", backward_cuda);
}

}  // namespace
}  // namespace sluice
