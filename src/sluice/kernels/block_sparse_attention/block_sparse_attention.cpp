// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/kernels/block_sparse_attention/signatures.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/attention_inputs.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using block_sparse::Backward, block_sparse::Forward, block_sparse::Optional;

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks, std::int64_t block_size,
                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, Optional seqused_k) {
  constexpr auto op = "block_sparse_attention";
  check_attention_inputs(op, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k);
  SLUICE_CHECK(blocks.dim() == 2 && blocks.size(0) == q.size(0) && blocks.scalar_type() == kInt,
               "{}: blocks must be int32 [Tq={}, K]; got {}", op, q.size(0), describe(blocks));
  SLUICE_CHECK(block_size >= 1, "{}: block_size must be at least 1; got {}", op, block_size);
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                        std::int64_t block_size, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                        Optional seqused_k, double) {
  check_inputs(q, k, v, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k);
  return {at::empty_symint({q.sym_size(0), q.sym_size(1), v.sym_size(2)}, q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, q.options().dtype(wide_type(q.scalar_type())))};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                                                 const Tensor&, const Tensor&, Optional, double) {
  const auto like = [](const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); };
  return {like(q), like(k), like(v)};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& q,
                                                const Tensor& k, const Tensor& v, const Tensor& blocks,
                                                std::int64_t block_size, const Tensor& cu_seqlens_q,
                                                const Tensor& cu_seqlens_k, Optional seqused_k, double scale) {
    static const auto op = registered_operator<Forward>("sluice::block_sparse_attention");
    const at::AutoDispatchBelowAutograd below;
    auto [out, lse] = op.call(q, k, v, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k, scale);
    context->save_for_backward({q, k, v, out, lse, blocks, cu_seqlens_q, cu_seqlens_k, seqused_k.value_or(Tensor())});
    context->saved_data["block_size"] = block_size;
    context->saved_data["scale"] = scale;
    context->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::block_sparse_attention_backward");
    const auto saved = context->get_saved_variables();
    const auto& [q, k, v, out, lse, blocks, cu_seqlens_q, cu_seqlens_k, seqused_k] =
        std::tie(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], saved[7], saved[8]);
    auto [dq, dk, dv] =
        op.call(grads[0], q, k, v, out, lse, blocks, context->saved_data["block_size"].toInt(), cu_seqlens_q,
                cu_seqlens_k, defined_or_none(seqused_k), context->saved_data["scale"].toDouble());
    return {dq, dk, dv, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                                            std::int64_t block_size, const Tensor& cu_seqlens_q,
                                            const Tensor& cu_seqlens_k, Optional seqused_k, double scale) {
  check_inputs(q, k, v, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k);
  auto outputs = Function::apply(q, k, v, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k, scale);
  return {outputs[0], outputs[1]};
}

}  // namespace

Tensor block_sparse_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& blocks,
                              std::int64_t block_size, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                              Optional seqused_k, double scale) {
  static const auto op = registered_operator<Forward>("sluice::block_sparse_attention");
  return std::get<0>(op.call(q, k, v, blocks, block_size, cu_seqlens_q, cu_seqlens_k, seqused_k, scale));
}

// lse [Tq, Hq]: log of the softmax's denominator, -infinity where a query attends to no key; what backward needs. The
// overloads are the kernels of the CUDA library, where it is loaded (gpu.cpp).
TORCH_LIBRARY_FRAGMENT(sluice, m) {
  for (const std::string overload : {"", ".sm90"}) {
    const auto forward = "block_sparse_attention" + overload +
                         "(Tensor q, Tensor k, Tensor v, Tensor blocks, int block_size, Tensor cu_seqlens_q, Tensor "
                         "cu_seqlens_k, Tensor? seqused_k, float scale) -> (Tensor out, Tensor lse)";
    const auto backward = "block_sparse_attention_backward" + overload +
                          "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor blocks, int "
                          "block_size, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, float scale) -> "
                          "(Tensor grad_q, Tensor grad_k, Tensor grad_v)";
    m.def(forward.c_str());
    m.def(backward.c_str());
  }
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("block_sparse_attention", forward_meta);
  m.impl("block_sparse_attention_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("block_sparse_attention", forward_autograd); }

}  // namespace sluice
