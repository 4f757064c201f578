// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/delta_gates/delta_gates.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                            const Tensor&, const Tensor&);
using BackwardInto = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                const Tensor&, const Tensor&, Tensor&, Tensor&);

void check_inputs(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  constexpr auto op = "delta_gates";
  check_float_type(op, "a", a);
  SLUICE_CHECK(a.dim() == 2 && b.sizes() == a.sizes() && b.scalar_type() == a.scalar_type(),
               "{}: a and b must be [T, H] of one dtype; got a {}, b {}", op, describe(a), describe(b));
  const auto type = wide_type(a.scalar_type());
  SLUICE_CHECK(A_log.sizes() == a.sizes().slice(1) && dt_bias.sizes() == A_log.sizes() && A_log.scalar_type() == type &&
                   dt_bias.scalar_type() == type,
               "{}: A_log and dt_bias must be {} [H={}], which stay exact whatever the model's dtype; got A_log {}, "
               "dt_bias {}",
               op, c10::toString(type), a.size(1), describe(A_log), describe(dt_bias));
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  check_inputs(a, b, A_log, dt_bias);
  const auto options = a.options().dtype(A_log.scalar_type());
  return {at::empty_symint(a.sym_sizes(), options), at::empty_symint(a.sym_sizes(), options)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor&, const Tensor& a, const Tensor& b,
                                                         const Tensor& A_log, const Tensor& dt_bias) {
  const auto like = [](const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); };
  return {like(a), like(b), like(A_log), like(dt_bias)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_g, const Tensor& grad_beta, const Tensor& a,
                                                    const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  Tensor grad_a = at::empty(a.sizes(), a.options()), grad_b = at::empty(b.sizes(), b.options());
  auto [dA_log, ddt_bias] = delta_gates_backward(grad_g, grad_beta, a, b, A_log, dt_bias, grad_a, grad_b);
  return {grad_a, grad_b, dA_log, ddt_bias};
}

std::tuple<Tensor, Tensor> backward_into_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor& A_log, const Tensor& dt_bias, Tensor&, Tensor&) {
  return {at::empty_symint(A_log.sym_sizes(), A_log.options()),
          at::empty_symint(dt_bias.sym_sizes(), dt_bias.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& a,
                                                const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
    static const auto op = registered_operator<Forward>("sluice::delta_gates");
    const at::AutoDispatchBelowAutograd below;
    auto [g, beta] = op.call(a, b, A_log, dt_bias);
    context->save_for_backward({a, b, A_log, dt_bias});
    return {g, beta};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::delta_gates_backward");
    const auto saved = context->get_saved_variables();
    auto [da, db, dA_log, ddt_bias] = op.call(grads[0], grads[1], saved[0], saved[1], saved[2], saved[3]);
    return {da, db, dA_log, ddt_bias};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& a, const Tensor& b, const Tensor& A_log,
                                            const Tensor& dt_bias) {
  check_inputs(a, b, A_log, dt_bias);
  auto outputs = Function::apply(a, b, A_log, dt_bias);
  return {outputs[0], outputs[1]};
}

}  // namespace

DeltaGates delta_gates(const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias) {
  static const auto op = registered_operator<Forward>("sluice::delta_gates");
  auto [g, beta] = op.call(a, b, A_log, dt_bias);
  return {g, beta};
}

DeltaGatesGradients delta_gates_backward(const Tensor& grad_g, const Tensor& grad_beta, const Tensor& a,
                                         const Tensor& b, const Tensor& A_log, const Tensor& dt_bias, Tensor& grad_a,
                                         Tensor& grad_b) {
  static const auto op = registered_operator<BackwardInto>("sluice::delta_gates_backward", "into");
  auto [dA_log, ddt_bias] = op.call(grad_g, grad_beta, a, b, A_log, dt_bias, grad_a, grad_b);
  return {dA_log, ddt_bias};
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("delta_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) -> (Tensor g, Tensor beta)");
  m.def(
      "delta_gates_backward(Tensor grad_g, Tensor grad_beta, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) -> "
      "(Tensor grad_a, Tensor grad_b, Tensor grad_A_log, Tensor grad_dt_bias)");
  m.def(
      "delta_gates_backward.into(Tensor grad_g, Tensor grad_beta, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
      "Tensor(a!) grad_a, Tensor(b!) grad_b) -> (Tensor grad_A_log, Tensor grad_dt_bias)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("delta_gates", forward_meta);
  m.impl("delta_gates_backward", backward_meta);
  m.impl("delta_gates_backward.into", backward_into_meta);
}
TORCH_LIBRARY_IMPL(sluice, CPU, m) { m.impl("delta_gates_backward", backward); }
TORCH_LIBRARY_IMPL(sluice, CUDA, m) { m.impl("delta_gates_backward", backward); }
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("delta_gates", forward_autograd); }

}  // namespace sluice
