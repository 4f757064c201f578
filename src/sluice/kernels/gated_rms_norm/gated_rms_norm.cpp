// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/gated_rms_norm/gated_rms_norm.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, double, std::string_view);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                                                    std::string_view);
using BackwardInto = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, std::string_view,
                            Tensor&, Tensor&);

void check_inputs(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, std::string_view activation) {
  constexpr auto op = "gated_rms_norm";
  check_float_type(op, "x", x);
  SLUICE_CHECK(x.dim() == 3 && weight.dim() == 1 && weight.size(0) == x.size(2) && x.size(2) > 0,
               "{}: x must be [T, H, V] and weight [V]; got x {}, weight {}", op, describe(x), describe(weight));
  SLUICE_CHECK(gate.sizes() == x.sizes() && gate.scalar_type() == x.scalar_type(),
               "{}: gate must have the shape and dtype of x; got x {}, gate {}", op, describe(x), describe(gate));
  SLUICE_CHECK(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == kFloat,
               "{}: weight must have the dtype of x or float32; got x {}, weight {}", op, describe(x),
               describe(weight));
  SLUICE_CHECK(eps > 0, "{}: eps must be positive, or a row of zeros divides by zero; got {}", op, eps);
  SLUICE_CHECK(activation == "silu" || activation == "sigmoid",
               "{}: activation must be \"silu\" or \"sigmoid\"; got \"{}\"", op, activation);
}

Tensor forward_meta(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                    std::string_view activation) {
  check_inputs(x, gate, weight, eps, activation);
  return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& x, const Tensor& gate,
                                                 const Tensor& weight, double, std::string_view) {
  const auto like = [](const Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); };
  return {like(x), like(gate), like(weight)};
}

// On devices whose own path writes nowhere but to fresh memory.
Tensor backward_into(const Tensor& grad_out, const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                     std::string_view activation, Tensor& grad_x, Tensor& grad_gate) {
  static const auto op = registered_operator<Backward>("sluice::gated_rms_norm_backward");
  auto [dx, dgate, dweight] = op.call(grad_out, x, gate, weight, eps, activation);
  grad_x.copy_(dx);
  grad_gate.copy_(dgate);
  return dweight;
}

std::string_view name_of(GateActivation activation) { return activation == GateActivation::kSilu ? "silu" : "sigmoid"; }

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& gate,
                        const Tensor& weight, double eps, const std::string& activation) {
    static const auto op = registered_operator<Forward>("sluice::gated_rms_norm");
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({x, gate, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["activation"] = activation;
    return op.call(x, gate, weight, eps, activation);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::gated_rms_norm_backward");
    const auto saved = context->get_saved_variables();
    auto [dx, dgate, dweight] = op.call(grads[0], saved[0], saved[1], saved[2], context->saved_data["eps"].toDouble(),
                                        context->saved_data["activation"].toStringRef());
    return {dx, dgate, dweight, Tensor(), Tensor()};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                        std::string_view activation) {
  check_inputs(x, gate, weight, eps, activation);
  return Function::apply(x, gate, weight, eps, std::string(activation));
}

}  // namespace

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                      GateActivation activation) {
  static const auto op = registered_operator<Forward>("sluice::gated_rms_norm");
  return op.call(x, gate, weight, eps, name_of(activation));
}

Tensor gated_rms_norm_backward(const Tensor& grad_out, const Tensor& x, const Tensor& gate, const Tensor& weight,
                               double eps, GateActivation activation, Tensor& grad_x, Tensor& grad_gate) {
  static const auto op = registered_operator<BackwardInto>("sluice::gated_rms_norm_backward", "into");
  return op.call(grad_out, x, gate, weight, eps, name_of(activation), grad_x, grad_gate);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, str activation) -> Tensor");
  m.def(
      "gated_rms_norm_backward(Tensor grad_out, Tensor x, Tensor gate, Tensor weight, float eps, str activation) -> "
      "(Tensor grad_x, Tensor grad_gate, Tensor grad_weight)");
  m.def(
      "gated_rms_norm_backward.into(Tensor grad_out, Tensor x, Tensor gate, Tensor weight, float eps, str activation, "
      "Tensor(a!) grad_x, Tensor(b!) grad_gate) -> Tensor grad_weight");
}
TORCH_LIBRARY_IMPL(sluice, CompositeExplicitAutograd, m) { m.impl("gated_rms_norm_backward.into", backward_into); }
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("gated_rms_norm", forward_meta);
  m.impl("gated_rms_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("gated_rms_norm", forward_autograd); }

}  // namespace sluice
