// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/attention/attention.h"

#include "sluice/kernels/common/attention_inputs.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                           Optional, std::int64_t, std::int64_t, double);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    Optional, std::int64_t, std::int64_t, double);

std::tuple<Tensor, Tensor> forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                        const Tensor& cu_seqlens_k, Optional seqused_k, std::int64_t, std::int64_t,
                                        double) {
  check_attention_inputs("attention", q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k);
  return {at::empty_symint({q.sym_size(0), q.sym_size(1), v.sym_size(2)}, q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, q.options().dtype(wide_type(q.scalar_type())))};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor&, const Tensor&, const Tensor&, const Tensor&, Optional,
                                                 std::int64_t, std::int64_t, double) {
  const auto like = [](const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); };
  return {like(q), like(k), like(v)};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& q,
                                                const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                                const Tensor& cu_seqlens_k, Optional seqused_k,
                                                std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double scale) {
    static const auto op = registered_operator<Forward>("sluice::attention");
    const at::AutoDispatchBelowAutograd below;
    auto [out, lse] = op.call(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, scale);
    context->save_for_backward({q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k.value_or(Tensor())});
    context->saved_data["max_seqlen_q"] = max_seqlen_q;
    context->saved_data["max_seqlen_k"] = max_seqlen_k;
    context->saved_data["scale"] = scale;
    context->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::attention_backward");
    const auto saved = context->get_saved_variables();
    const auto& [q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k] =
        std::tie(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], saved[7]);
    auto& data = context->saved_data;
    auto [dq, dk, dv] = op.call(grads[0], q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, defined_or_none(seqused_k),
                                data["max_seqlen_q"].toInt(), data["max_seqlen_k"].toInt(), data["scale"].toDouble());
    return {dq, dk, dv, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, Optional seqused_k,
                                            std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double scale) {
  check_attention_inputs("attention", q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k);
  auto outputs = Function::apply(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, scale);
  return {outputs[0], outputs[1]};
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                 const Tensor& cu_seqlens_k, Optional seqused_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                 double scale) {
  static const auto op = registered_operator<Forward>("sluice::attention");
  return std::get<0>(op.call(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, scale));
}

// lse [Tq, Hq]: log of the softmax's denominator, -infinity where a query sees no key; what backward needs.
TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, int "
      "max_seqlen_q, int max_seqlen_k, float scale) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, Tensor? seqused_k, int max_seqlen_q, int max_seqlen_k, float scale) -> (Tensor grad_q, "
      "Tensor grad_k, Tensor grad_v)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("attention", forward_meta);
  m.impl("attention_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("attention", forward_autograd); }

}  // namespace sluice
