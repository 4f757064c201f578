// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/stream_mix/stream_mix.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = Tensor(const Tensor&, const Tensor&);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);

void check_inputs(const Tensor& x, const Tensor& gate) {
  check_float_type("stream_mix", "x", x);
  SLUICE_CHECK(x.dim() == 3 && x.size(1) > 0 && gate.sizes() == x.sizes() && gate.scalar_type() == x.scalar_type(),
               "stream_mix: x and gate must be [T, n, D] of one dtype, with a stream at least; got x {}, gate {}",
               describe(x), describe(gate));
}

Tensor forward_meta(const Tensor& x, const Tensor& gate) {
  check_inputs(x, gate);
  return at::empty_symint({x.sym_size(0), x.sym_size(2)}, x.options());
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& x, const Tensor& gate) {
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(gate.sym_sizes(), gate.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& gate) {
    static const auto op = registered_operator<Forward>("sluice::stream_mix");
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({x, gate});
    return op.call(x, gate);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::stream_mix_backward");
    const auto saved = context->get_saved_variables();
    auto [grad_x, grad_gate] = op.call(grads[0], saved[0], saved[1]);
    return {grad_x, grad_gate};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& gate) {
  check_inputs(x, gate);
  return Function::apply(x, gate);
}

}  // namespace

Tensor stream_mix(const Tensor& x, const Tensor& gate) {
  static const auto op = registered_operator<Forward>("sluice::stream_mix");
  return op.call(x, gate);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("stream_mix(Tensor x, Tensor gate) -> Tensor");
  m.def("stream_mix_backward(Tensor grad_out, Tensor x, Tensor gate) -> (Tensor grad_x, Tensor grad_gate)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("stream_mix", forward_meta);
  m.impl("stream_mix_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("stream_mix", forward_autograd); }

}  // namespace sluice
