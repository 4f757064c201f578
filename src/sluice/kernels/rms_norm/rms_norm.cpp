// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/rms_norm/rms_norm.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = Tensor(const Tensor&, const Tensor&, double, bool);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double, bool);

void check_inputs(const Tensor& x, const Tensor& weight, double eps) {
  constexpr auto op = "rms_norm";
  check_float_type(op, "x", x);
  const bool fits = weight.dim() >= 1 && weight.dim() <= 2 && x.dim() >= weight.dim() &&
                    x.sizes().slice(x.dim() - weight.dim()) == weight.sizes();
  SLUICE_CHECK(fits && weight.size(-1) > 0,
               "{}: x must be [..., D] and weight [D], or [..., H, D] and [H, D]; got x {}, weight {}", op, describe(x),
               describe(weight));
  SLUICE_CHECK(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == kFloat,
               "{}: weight must have the dtype of x or float32; got x {}, weight {}", op, describe(x),
               describe(weight));
  SLUICE_CHECK(eps > 0, "{}: eps must be positive, or a row of zeros divides by zero; got {}", op, eps);
}

Tensor forward_meta(const Tensor& x, const Tensor& weight, double eps, bool) {
  check_inputs(x, weight, eps);
  return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& x, const Tensor& weight, double, bool) {
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(weight.sym_sizes(), weight.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight, double eps,
                        bool zero_centered) {
    static const auto op = registered_operator<Forward>("sluice::rms_norm");
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["zero_centered"] = zero_centered;
    return op.call(x, weight, eps, zero_centered);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::rms_norm_backward");
    const auto saved = context->get_saved_variables();
    auto [dx, dweight] = op.call(grads[0], saved[0], saved[1], context->saved_data["eps"].toDouble(),
                                 context->saved_data["zero_centered"].toBool());
    return {dx, dweight, Tensor(), Tensor()};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
  check_inputs(x, weight, eps);
  return Function::apply(x, weight, eps, zero_centered);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool zero_centered) {
  static const auto op = registered_operator<Forward>("sluice::rms_norm");
  return op.call(x, weight, eps, zero_centered);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool zero_centered) -> Tensor");
  m.def(
      "rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor grad_x, "
      "Tensor grad_weight)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("rms_norm", forward_meta);
  m.impl("rms_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("rms_norm", forward_autograd); }

}  // namespace sluice
