// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/causal_conv/causal_conv.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/common/slots.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, Optional, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Optional, const Tensor&, const Tensor&,
                                                    const Tensor&, Optional, bool);
using BackwardInto = std::tuple<Tensor, Tensor>(const Tensor&, Optional, const Tensor&, const Tensor&, const Tensor&,
                                                Optional, bool, Tensor&);

using Cached = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Tensor&, bool);

constexpr std::int64_t kFewTokens = 8;  // a GPU's thread walks them

void check_inputs(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state) {
  constexpr auto op = "causal_conv";
  check_float_type(op, "x", x);
  SLUICE_CHECK(
      x.dim() == 2 && weight.dim() == 3 && weight.size(0) == x.size(1) && weight.size(1) == 1 && weight.size(2) >= 1,
      "{}: x must be [T, C] and weight [C, 1, W] with W >= 1; got x {}, weight {}", op, describe(x), describe(weight));
  SLUICE_CHECK(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == kFloat,
               "{}: weight must have the dtype of x or float32; got x {}, weight {}", op, describe(x),
               describe(weight));
  check_cu_seqlens(op, cu_seqlens);
  if (initial_state) {
    const std::vector<std::int64_t> shape{cu_seqlens.size(0) - 1, x.size(1), weight.size(2) - 1};
    SLUICE_CHECK(initial_state->sizes() == at::IntArrayRef(shape) && initial_state->scalar_type() == x.scalar_type(),
                 "{}: initial_state must be [N={}, C={}, W-1={}] in the dtype of x, {}; got {}", op, shape[0], shape[1],
                 shape[2], c10::toString(x.scalar_type()), describe(*initial_state));
  }
}

Tensor empty_state(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens) {
  return at::empty_symint({cu_seqlens.sym_size(0) - 1, x.sym_size(1), weight.sym_size(2) - 1}, x.options());
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                        Optional initial_state, bool) {
  check_inputs(x, weight, cu_seqlens, initial_state);
  return {at::empty_symint(x.sym_sizes(), x.options()), empty_state(x, weight, cu_seqlens)};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, Optional, const Tensor& x, const Tensor& weight,
                                                 const Tensor& cu_seqlens, Optional, bool) {
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(weight.sym_sizes(), weight.options()),
          empty_state(x, weight, cu_seqlens)};
}

// On devices whose own path writes nowhere but to fresh memory.
std::tuple<Tensor, Tensor> backward_into(const Tensor& grad_out, Optional grad_final_state, const Tensor& x,
                                         const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state,
                                         bool silu, Tensor& grad_x) {
  static const auto op = registered_operator<Backward>("sluice::causal_conv_backward");
  auto [dx, dweight, dstate] = op.call(grad_out, grad_final_state, x, weight, cu_seqlens, initial_state, silu);
  grad_x.copy_(dx);
  return {dweight, dstate};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& x,
                                                const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state,
                                                bool silu) {
    static const auto op = registered_operator<Forward>("sluice::causal_conv");
    const at::AutoDispatchBelowAutograd below;
    auto [out, final_state] = op.call(x, weight, cu_seqlens, initial_state, silu);
    context->save_for_backward({x, weight, cu_seqlens, initial_state.value_or(Tensor())});
    context->saved_data["silu"] = silu;
    context->set_materialize_grads(false);
    return {out, final_state};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::causal_conv_backward");
    const auto saved = context->get_saved_variables();
    const auto& [x, weight, cu_seqlens, state] = std::tie(saved[0], saved[1], saved[2], saved[3]);
    const auto grad_out = grads[0].defined() ? grads[0] : at::zeros_like(x);
    auto [dx, dweight, dstate] = op.call(grad_out, defined_or_none(grads[1]), x, weight, cu_seqlens,
                                         defined_or_none(state), context->saved_data["silu"].toBool());
    return {dx, dweight, Tensor(), state.defined() ? dstate : Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                            Optional initial_state, bool silu) {
  check_inputs(x, weight, cu_seqlens, initial_state);
  auto outputs = Function::apply(x, weight, cu_seqlens, initial_state, silu);
  return {outputs[0], outputs[1]};
}

Tensor cached_by_copy(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens, const Tensor& slots,
                      Tensor& states, bool silu) {
  const auto output = causal_conv(x, weight, cu_seqlens, read_slots(states, slots), silu);
  write_slots(states, slots, output.final_state);
  return output.out;
}

}  // namespace

CausalConvOutput causal_conv(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state,
                             bool silu) {
  static const auto op = registered_operator<Forward>("sluice::causal_conv");
  auto [out, final_state] = op.call(x, weight, cu_seqlens, initial_state, silu);
  return {out, final_state};
}

Tensor causal_conv_cached(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens, const Tensor& slots,
                          Tensor& states, std::int64_t max_seqlen, bool silu) {
  if (max_seqlen > kFewTokens) return cached_by_copy(x, weight, cu_seqlens, slots, states, silu);
  static const auto op = registered_operator<Cached>("sluice::causal_conv", "cached");
  return op.call(x, weight, cu_seqlens, slots, states, silu);
}

CausalConvGradients causal_conv_backward(const Tensor& grad_out, Optional grad_final_state, const Tensor& x,
                                         const Tensor& weight, const Tensor& cu_seqlens, Optional initial_state,
                                         bool silu, Tensor& grad_x) {
  static const auto op = registered_operator<BackwardInto>("sluice::causal_conv_backward", "into");
  auto [dweight, dstate] = op.call(grad_out, grad_final_state, x, weight, cu_seqlens, initial_state, silu, grad_x);
  return {dweight, dstate};
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def(
      "causal_conv.cached(Tensor x, Tensor weight, Tensor cu_seqlens, Tensor slots, Tensor(a!) states, bool silu) -> "
      "Tensor out");
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor cu_seqlens, Tensor? initial_state, bool silu) -> (Tensor out, "
      "Tensor final_state)");
  m.def(
      "causal_conv_backward(Tensor grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor cu_seqlens, "
      "Tensor? initial_state, bool silu) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_initial_state)");
  m.def(
      "causal_conv_backward.into(Tensor grad_out, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor "
      "cu_seqlens, "
      "Tensor? initial_state, bool silu, Tensor(a!) grad_x) -> (Tensor grad_weight, Tensor grad_initial_state)");
}
TORCH_LIBRARY_IMPL(sluice, CompositeExplicitAutograd, m) {
  m.impl("causal_conv.cached", cached_by_copy);
  m.impl("causal_conv_backward.into", backward_into);
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("causal_conv", forward_meta);
  m.impl("causal_conv_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("causal_conv", forward_autograd); }

}  // namespace sluice
