// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/expert_matmul/expert_matmul.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;
using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, Optional, Optional, c10::SymInt);
using Backward = Tensor(const Tensor&, const Tensor&, const Tensor&, Optional, Optional);

void check_rows(const char* name, Optional rows) {
  SLUICE_CHECK(!rows || (rows->dim() == 1 && rows->scalar_type() == kLong),
               "expert_matmul: {} must be int64 [lines]; got {}", name, describe(*rows));
}

void check_inputs(const Tensor& x, const Tensor& weight, const Tensor& offsets, Optional x_rows, Optional out_rows) {
  constexpr auto op = "expert_matmul";
  check_float_type(op, "x", x);
  SLUICE_CHECK(
      x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2) && weight.scalar_type() == x.scalar_type(),
      "{}: x must be [rows, in] and weight [E, out, in] of one dtype; got x {}, weight {}", op, describe(x),
      describe(weight));
  SLUICE_CHECK(offsets.dim() == 1 && offsets.size(0) == weight.size(0) + 1 && offsets.scalar_type() == kInt,
               "{}: offsets must be int32 [E + 1 = {}]; got {}", op, weight.size(0) + 1, describe(offsets));
  check_rows("x_rows", x_rows);
  check_rows("out_rows", out_rows);
}

Tensor forward_meta(const Tensor& x, const Tensor& weight, const Tensor& offsets, Optional x_rows, Optional out_rows,
                    c10::SymInt out_size) {
  check_inputs(x, weight, offsets, x_rows, out_rows);
  return at::empty_symint({std::move(out_size), weight.sym_size(1)}, x.options());
}

Tensor backward_meta(const Tensor& grad, const Tensor& x, const Tensor& offsets, Optional, Optional) {
  return at::empty_symint({offsets.sym_size(0) - 1, grad.sym_size(1), x.sym_size(1)}, x.options());
}

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const Tensor& offsets, Optional x_rows, Optional out_rows, c10::SymInt out_size) {
    static const auto op = registered_operator<Forward>("sluice::expert_matmul");
    const at::AutoDispatchBelowAutograd below;
    // What only the other's gradient needs is not kept.
    context->save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor(), offsets,
                                x_rows.value_or(Tensor()), out_rows.value_or(Tensor())});
    context->saved_data["x_size"] = x.sym_size(0);
    return op.call(x, weight, offsets, x_rows, out_rows, std::move(out_size));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto forward = registered_operator<Forward>("sluice::expert_matmul");
    static const auto backward = registered_operator<Backward>("sluice::expert_matmul_backward");
    const auto saved = context->get_saved_variables();
    const auto& [x, weight, offsets] = std::tie(saved[0], saved[1], saved[2]);
    const auto x_rows = defined_or_none(saved[3]), out_rows = defined_or_none(saved[4]);
    Tensor dx, dweight;
    if (weight.defined()) {
      dx = forward.call(grads[0], weight.transpose(1, 2), offsets, out_rows, x_rows,
                        context->saved_data["x_size"].toSymInt());
    }
    if (x.defined()) dweight = backward.call(grads[0], x, offsets, out_rows, x_rows);
    return {dx, dweight, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& weight, const Tensor& offsets, Optional x_rows,
                        Optional out_rows, c10::SymInt out_size) {
  check_inputs(x, weight, offsets, x_rows, out_rows);
  return Function::apply(x, weight, offsets, x_rows, out_rows, std::move(out_size));
}

}  // namespace

Tensor expert_matmul(const Tensor& x, const Tensor& weight, const Tensor& offsets, Optional x_rows, Optional out_rows,
                     std::int64_t out_size) {
  static const auto op = registered_operator<Forward>("sluice::expert_matmul");
  return op.call(x, weight, offsets, x_rows, out_rows, out_size);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def(
      "expert_matmul(Tensor x, Tensor weight, Tensor offsets, Tensor? x_rows, Tensor? out_rows, SymInt out_size) -> "
      "Tensor");
  // The gradient of weight; that of x is expert_matmul itself.
  m.def(
      "expert_matmul_backward(Tensor grad_out, Tensor x, Tensor offsets, Tensor? out_rows, Tensor? x_rows) -> Tensor "
      "grad_weight");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("expert_matmul", forward_meta);
  m.impl("expert_matmul_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("expert_matmul", forward_autograd); }

}  // namespace sluice
