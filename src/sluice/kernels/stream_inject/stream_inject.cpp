// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/stream_inject/stream_inject.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);

void check_inputs(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  check_float_type("stream_inject", "residual", residual);
  const bool fits = residual.dim() == 3 && residual.size(2) > 0 && y.dim() == 2 && gate.dim() == 2 &&
                    y.size(0) == residual.size(0) && y.size(1) == residual.size(2) &&
                    gate.sizes() == residual.sizes().slice(0, 2);
  SLUICE_CHECK(fits && y.scalar_type() == residual.scalar_type() && gate.scalar_type() == residual.scalar_type(),
               "stream_inject: residual must be [T, n, D], y [T, D] and gate [T, n], of one dtype; got residual {}, y "
               "{}, gate {}",
               describe(residual), describe(y), describe(gate));
}

Tensor forward_meta(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  check_inputs(residual, y, gate);
  return at::empty_symint(residual.sym_sizes(), residual.options());
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& y, const Tensor& gate) {
  return {at::empty_symint(y.sym_sizes(), y.options()), at::empty_symint(gate.sym_sizes(), gate.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& residual, const Tensor& y,
                        const Tensor& gate) {
    static const auto op = registered_operator<Forward>("sluice::stream_inject");
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({y, gate});
    return op.call(residual, y, gate);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::stream_inject_backward");
    const auto saved = context->get_saved_variables();
    auto [grad_y, grad_gate] = op.call(grads[0], saved[0], saved[1]);
    return {grads[0], grad_y, grad_gate};
  }
};

Tensor forward_autograd(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  check_inputs(residual, y, gate);
  return Function::apply(residual, y, gate);
}

}  // namespace

Tensor stream_inject(const Tensor& residual, const Tensor& y, const Tensor& gate) {
  static const auto op = registered_operator<Forward>("sluice::stream_inject");
  return op.call(residual, y, gate);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("stream_inject(Tensor residual, Tensor y, Tensor gate) -> Tensor");
  m.def("stream_inject_backward(Tensor grad_out, Tensor y, Tensor gate) -> (Tensor grad_y, Tensor grad_gate)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("stream_inject", forward_meta);
  m.impl("stream_inject_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("stream_inject", forward_autograd); }

}  // namespace sluice
