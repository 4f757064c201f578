// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/rotary/rotary.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&);

void check_inputs(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  constexpr auto op = "rotary";
  check_float_type(op, "x", x);
  SLUICE_CHECK(x.dim() == 3 && cos.dim() == 2 && cos.size(0) == x.size(0) && 2 * cos.size(1) <= x.size(2),
               "{}: x must be [T, H, d] and cos [T, rd/2] with rd <= d; got x {}, cos {}", op, describe(x),
               describe(cos));
  SLUICE_CHECK(sin.sizes() == cos.sizes() && sin.scalar_type() == cos.scalar_type(),
               "{}: sin must have the shape and dtype of cos; got cos {}, sin {}", op, describe(cos), describe(sin));
  SLUICE_CHECK(cos.scalar_type() == kFloat || (cos.scalar_type() == kDouble && x.scalar_type() == kDouble),
               "{}: cos and sin must be float32 (float64 is taken beside a float64 x); got x {}, cos {}", op,
               describe(x), describe(cos));
}

Tensor forward_meta(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_inputs(x, cos, sin);
  return at::empty_symint(x.sym_sizes(), x.options());
}

class Function : public torch::autograd::Function<Function> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& cos,
                        const Tensor& sin) {
    static const auto op = registered_operator<Forward>("sluice::rotary");
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({cos, sin});
    return op.call(x, cos, sin);
  }

  // The transpose of a rotation is the rotation back.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {rotary(grads[0], saved[0], saved[1].neg()), Tensor(), Tensor()};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_inputs(x, cos, sin);
  return Function::apply(x, cos, sin);
}

}  // namespace

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  static const auto op = registered_operator<Forward>("sluice::rotary");
  return op.call(x, cos, sin);
}

RotaryTable rotary_table(const Tensor& positions, double theta, std::int64_t rotary_dim) {
  SLUICE_CHECK(positions.dim() == 1 && positions.scalar_type() == kLong,
               "rotary_table: positions must be int64 [T]; got {}", describe(positions));
  SLUICE_CHECK(rotary_dim >= 0 && rotary_dim % 2 == 0 && theta > 1,
               "rotary_table: rotary_dim must be even and theta above 1; got rotary_dim {}, theta {}", rotary_dim,
               theta);
  const auto options = positions.options().dtype(kFloat);
  const auto exponents = at::arange(0, rotary_dim, 2, options) / static_cast<double>(rotary_dim);
  const auto frequencies = at::pow(theta, exponents).reciprocal();  // [rd/2]
  const auto angles = positions.to(kFloat).unsqueeze(1) * frequencies;
  return {angles.cos(), angles.sin()};
}

TORCH_LIBRARY_FRAGMENT(sluice, m) { m.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor"); }
TORCH_LIBRARY_IMPL(sluice, Meta, m) { m.impl("rotary", forward_meta); }
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("rotary", forward_autograd); }

}  // namespace sluice
