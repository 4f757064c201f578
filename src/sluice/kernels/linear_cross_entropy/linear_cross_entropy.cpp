// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double, bool);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            double, const std::optional<Tensor>&, const std::optional<Tensor>&, bool);

using Loss = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                        bool, bool);

void check_inputs(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double logit_scale = 1) {
  constexpr auto op = "linear_cross_entropy";
  check_float_type(op, "hidden", hidden);
  SLUICE_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) && weight.size(0) > 0 &&
                   weight.scalar_type() == hidden.scalar_type(),
               "{}: hidden must be [T, D] and weight [V, D] of one dtype; got hidden {}, weight {}", op,
               describe(hidden), describe(weight));
  SLUICE_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) && targets.scalar_type() == kLong,
               "{}: targets must be int64 [T={}]; got {}", op, hidden.size(0), describe(targets));
  SLUICE_CHECK(logit_scale > 0, "{}: logit_scale must be above 0; got {}", op, logit_scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_meta(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& targets, double logit_scale, bool entropy) {
  check_inputs(hidden, weight, targets, logit_scale);
  const auto wide = hidden.options().dtype(wide_type(hidden.scalar_type()));
  return {at::empty_symint(targets.sym_sizes(), wide), at::empty_symint(targets.sym_sizes(), targets.options()),
          at::empty_symint(targets.sym_sizes(), wide),
          entropy ? at::empty_symint(targets.sym_sizes(), wide) : at::empty({0}, wide)};
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& hidden, const Tensor& weight, const Tensor&,
                                         const Tensor&, double, const std::optional<Tensor>&,
                                         const std::optional<Tensor>&, bool weight_gradient) {
  return {at::empty_symint(hidden.sym_sizes(), hidden.options()),
          weight_gradient ? at::empty_symint(weight.sym_sizes(), weight.options()) : at::empty({0}, weight.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& hidden,
                                                const Tensor& weight, const Tensor& targets, double logit_scale,
                                                bool entropy) {
    static const auto op = registered_operator<Forward>("sluice::linear_cross_entropy");
    const at::AutoDispatchBelowAutograd below;
    auto [nll, predicted, lse, entropies] = op.call(hidden, weight, targets, logit_scale, entropy);
    context->save_for_backward({hidden, weight, targets, lse, entropies});
    context->saved_data["logit_scale"] = logit_scale;
    context->set_materialize_grads(false);
    if (entropy) context->mark_non_differentiable({predicted, lse});
    else context->mark_non_differentiable({predicted, lse, entropies});
    return {nll, predicted, lse, entropies};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::linear_cross_entropy_backward");
    const auto saved = context->get_saved_variables();
    const auto &grad_nll = grads[0], &grad_entropy = grads[3], &lse = saved[3];
    if (!grad_nll.defined() && !grad_entropy.defined()) return torch::autograd::variable_list(5);
    const auto entropy = [&](const Tensor& x) { return grad_entropy.defined() ? std::optional(x) : std::nullopt; };
    auto [d_hidden, d_weight] = op.call(grad_nll.defined() ? grad_nll : at::zeros_like(lse), saved[0], saved[1],
                                        saved[2], lse, context->saved_data["logit_scale"].toDouble(),
                                        entropy(grad_entropy), entropy(saved[4]), context->needs_input_grad(1));
    return {d_hidden, context->needs_input_grad(1) ? d_weight : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> loss_meta(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                     const Tensor& loss_weight, bool hidden_gradient,
                                                     bool weight_gradient) {
  const auto like = [](const Tensor& x, bool wanted) {
    return wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  };
  return {at::empty({}, loss_weight.options()), like(targets, true), like(hidden, hidden_gradient),
          like(weight, weight_gradient)};
}

class LossFunction : public torch::autograd::Function<LossFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& hidden,
                                                const Tensor& weight, const Tensor& targets, const Tensor& loss_weight,
                                                bool hidden_gradient, bool weight_gradient) {
    static const auto op = registered_operator<Loss>("sluice::linear_cross_entropy", "loss");
    const at::AutoDispatchBelowAutograd below;
    auto [loss, predicted, grad_hidden, grad_weight] =
        op.call(hidden, weight, targets, loss_weight, hidden_gradient, weight_gradient);
    context->save_for_backward({grad_hidden, grad_weight});
    context->mark_non_differentiable({predicted});
    return {loss, predicted};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto scaled = [&](std::size_t i) { return context->needs_input_grad(i) ? saved[i] * grads[0] : Tensor(); };
    return {scaled(0), scaled(1), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_autograd(const Tensor& hidden, const Tensor& weight,
                                                            const Tensor& targets, double logit_scale, bool entropy) {
  check_inputs(hidden, weight, targets, logit_scale);
  auto outputs = Function::apply(hidden, weight, targets, logit_scale, entropy);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

}  // namespace

LinearCrossEntropyOutput linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                              double logit_scale, bool entropy) {
  static const auto op = registered_operator<Forward>("sluice::linear_cross_entropy");
  auto [nll, predicted, lse, entropies] = op.call(hidden, weight, targets, logit_scale, entropy);
  return {nll, predicted, entropies, lse};
}

LinearCrossEntropyGradients linear_cross_entropy_backward(const Tensor& grad_nll, const Tensor& hidden,
                                                          const Tensor& weight, const Tensor& targets,
                                                          const Tensor& lse, double logit_scale, bool weight_gradient) {
  static const auto op = registered_operator<Backward>("sluice::linear_cross_entropy_backward");
  check_inputs(hidden, weight, targets, logit_scale);
  for (const auto* x : {&grad_nll, &lse}) {
    SLUICE_CHECK(x->sizes() == targets.sizes() && x->scalar_type() == wide_type(hidden.scalar_type()),
                 "linear_cross_entropy: grad_nll and lse must be {} [T={}]; got {}",
                 c10::toString(wide_type(hidden.scalar_type())), targets.size(0), describe(*x));
  }
  auto [grad_hidden, grad_weight] =
      op.call(grad_nll, hidden, weight, targets, lse, logit_scale, std::nullopt, std::nullopt, weight_gradient);
  return {grad_hidden, grad_weight};
}

LinearCrossEntropyLoss linear_cross_entropy_loss(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                 const Tensor& loss_weight) {
  check_inputs(hidden, weight, targets);
  SLUICE_CHECK(loss_weight.sizes() == targets.sizes() && loss_weight.scalar_type() == wide_type(hidden.scalar_type()),
               "linear_cross_entropy: loss_weight must be {} [T={}]; got {}",
               c10::toString(wide_type(hidden.scalar_type())), targets.size(0), describe(loss_weight));
  const auto wanted = [](const Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); };
  const auto outputs = LossFunction::apply(hidden, weight, targets, loss_weight, wanted(hidden), wanted(weight));
  return {outputs[0], outputs[1]};
}

// lse [T]: log sum exp of each token's logits, 0 where ignored; what backward needs. entropy: empty unless asked for.
// Backward takes grad_entropy and the entropy of forward together, or neither. A gradient that is not wanted is empty.
TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, float logit_scale=1.0, bool entropy=False) "
      "-> (Tensor nll, Tensor predicted, Tensor lse, Tensor entropy)");
  m.def(
      "linear_cross_entropy_backward(Tensor grad_nll, Tensor hidden, Tensor weight, Tensor targets, Tensor lse, float "
      "logit_scale=1.0, Tensor? grad_entropy=None, Tensor? entropy=None, bool weight_gradient=True) -> (Tensor "
      "grad_hidden, Tensor grad_weight)");
  m.def(
      "linear_cross_entropy.loss(Tensor hidden, Tensor weight, Tensor targets, Tensor loss_weight, bool "
      "hidden_gradient, bool weight_gradient) -> (Tensor loss, Tensor predicted, Tensor grad_hidden, Tensor "
      "grad_weight)");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("linear_cross_entropy", forward_meta);
  m.impl("linear_cross_entropy_backward", backward_meta);
  m.impl("linear_cross_entropy.loss", loss_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("linear_cross_entropy", forward_autograd); }

}  // namespace sluice
