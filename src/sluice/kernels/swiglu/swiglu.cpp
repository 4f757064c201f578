// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/swiglu/swiglu.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = Tensor(const Tensor&, const Tensor&);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);

void check_inputs(const Tensor& gate, const Tensor& up) {
  check_float_type("swiglu", "gate", gate);
  SLUICE_CHECK(gate.dim() == 2 && up.sizes() == gate.sizes() && up.scalar_type() == gate.scalar_type(),
               "swiglu: gate and up must be [T, F] of one dtype; got gate {}, up {}", describe(gate), describe(up));
}

Tensor forward_meta(const Tensor& gate, const Tensor& up) {
  check_inputs(gate, up);
  return at::empty_symint(gate.sym_sizes(), gate.options());
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& gate, const Tensor& up) {
  return {at::empty_symint(gate.sym_sizes(), gate.options()), at::empty_symint(up.sym_sizes(), up.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& gate, const Tensor& up) {
    static const auto op = registered_operator<Forward>("sluice::swiglu");
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({gate, up});
    return op.call(gate, up);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::swiglu_backward");
    const auto saved = context->get_saved_variables();
    auto [grad_gate, grad_up] = op.call(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

Tensor forward_autograd(const Tensor& gate, const Tensor& up) {
  check_inputs(gate, up);
  return Function::apply(gate, up);
}

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static const auto op = registered_operator<Forward>("sluice::swiglu");
  return op.call(gate, up);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_out, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("swiglu", forward_meta);
  m.impl("swiglu_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("swiglu", forward_autograd); }

}  // namespace sluice
