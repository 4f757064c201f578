// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/slots.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;
using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                   const Tensor&, const Tensor&, Optional, double, bool, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, Optional, const Tensor&,
                                                                            const Tensor&, const Tensor&, const Tensor&,
                                                                            const Tensor&, const Tensor&, Optional,
                                                                            const Tensor&, double, bool);
using BackwardInto = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Optional, const Tensor&, const Tensor&,
                                                        const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                        Optional, const Tensor&, double, bool, Tensor&, Tensor&,
                                                        Tensor&);
using Prepare = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                       bool);
using Prepared = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor&, const Tensor&, Optional, double, bool, bool);
using BeginBackward = std::tuple<Tensor, std::vector<Tensor>>(const Tensor&, const Tensor&, const Tensor&,
                                                              const Tensor&, const Tensor&, const Tensor&,
                                                              const Tensor&, Optional, double, bool, bool);
using FinishBackward = std::tuple<Tensor, Tensor>(at::TensorList, Optional, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, const Tensor&, const Tensor&, Optional,
                                                  double, bool, Tensor&, Tensor&, Tensor&);
using Cached = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, Tensor&, double, bool);

constexpr std::int64_t kFewTokens = 8;  // a GPU takes them one by one

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                  const Tensor& cu_seqlens, Optional initial_state) {
  constexpr auto op = "gated_delta_rule";
  SLUICE_CHECK(q.dim() == 3 && v.dim() == 3 && q.size(0) == v.size(0) && q.size(1) > 0 && v.size(1) % q.size(1) == 0,
               "{}: q must be [T, Hk, K] and v [T, Hv, V] with Hv a multiple of Hk; got q {}, v {}", op, describe(q),
               describe(v));
  SLUICE_CHECK(k.sizes() == q.sizes() && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
               "{}: q, k and v must have one dtype, and k the shape of q; got q {}, k {}, v {}", op, describe(q),
               describe(k), describe(v));
  const auto gate_shape = v.sizes().slice(0, 2);
  const auto gate_type = v.scalar_type() == kDouble ? kDouble : kFloat;
  SLUICE_CHECK(g.sizes() == gate_shape && beta.sizes() == gate_shape && g.scalar_type() == gate_type &&
                   beta.scalar_type() == gate_type,
               "{}: g and beta must be {} [T={}, Hv={}]; got g {}, beta {}.\n"
               "  Each value head has its own decay and strength, kept in float32: small decays vanish in bfloat16.",
               op, gate_type == kDouble ? "float64" : "float32", v.size(0), v.size(1), describe(g), describe(beta));
  check_cu_seqlens(op, cu_seqlens);
  if (initial_state) {
    const std::vector<std::int64_t> shape{cu_seqlens.size(0) - 1, v.size(1), q.size(2), v.size(2)};
    SLUICE_CHECK(initial_state->sizes() == at::IntArrayRef(shape) && initial_state->scalar_type() == gate_type,
                 "{}: initial_state must be [N={}, Hv={}, K={}, V={}] in the dtype of g; got {}", op, shape[0],
                 shape[1], shape[2], shape[3], describe(*initial_state));
  }
}

std::tuple<Tensor, Tensor, Tensor> forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                const Tensor& beta, const Tensor& cu_seqlens, Optional initial_state,
                                                double, bool, bool output_final_state) {
  check_inputs(q, k, v, g, beta, cu_seqlens, initial_state);
  const auto sequences = output_final_state ? cu_seqlens.sym_size(0) - 1 : c10::SymInt(0);
  return {at::empty_symint(v.sym_sizes(), v.options()),
          at::empty_symint({sequences, v.sym_size(1), q.sym_size(2), v.sym_size(2)}, g.options()),
          at::empty({0}, g.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor&, Optional, const Tensor& q,
                                                                         const Tensor& k, const Tensor& v,
                                                                         const Tensor& g, const Tensor& beta,
                                                                         const Tensor& cu_seqlens, Optional,
                                                                         const Tensor&, double, bool) {
  const auto like = [](const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); };
  return {like(q),
          like(k),
          like(v),
          like(g),
          like(beta),
          at::empty_symint({cu_seqlens.sym_size(0) - 1, v.sym_size(1), q.sym_size(2), v.sym_size(2)}, g.options())};
}

class Function : public torch::autograd::Function<Function> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& q,
                                                const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                                const Tensor& cu_seqlens, Optional initial_state, double scale,
                                                bool qk_l2norm, bool output_final_state) {
    static const auto op = registered_operator<Forward>("sluice::gated_delta_rule");
    const at::AutoDispatchBelowAutograd below;
    auto [out, final_state, checkpoints] =
        op.call(q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm, output_final_state);
    context->save_for_backward({q, k, v, g, beta, cu_seqlens, initial_state.value_or(Tensor()), checkpoints});
    context->saved_data["scale"] = scale;
    context->saved_data["qk_l2norm"] = qk_l2norm;
    context->saved_data["output_final_state"] = output_final_state;
    context->mark_non_differentiable({checkpoints});
    context->set_materialize_grads(false);
    return {out, final_state, checkpoints};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op = registered_operator<Backward>("sluice::gated_delta_rule_backward");
    const auto saved = context->get_saved_variables();
    const auto& [q, k, v, g, beta, cu_seqlens, state, checkpoints] =
        std::tie(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], saved[7]);
    const auto grad_out = grads[0].defined() ? grads[0] : at::zeros_like(v);
    const auto grad_final_state =
        context->saved_data["output_final_state"].toBool() ? defined_or_none(grads[1]) : std::nullopt;
    auto [dq, dk, dv, dg, dbeta, dstate] =
        op.call(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, defined_or_none(state), checkpoints,
                context->saved_data["scale"].toDouble(), context->saved_data["qk_l2norm"].toBool());
    return {dq, dk, dv, dg, dbeta, Tensor(), state.defined() ? dstate : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                    const Tensor& beta, const Tensor& cu_seqlens,
                                                    Optional initial_state, double scale, bool qk_l2norm,
                                                    bool output_final_state) {
  check_inputs(q, k, v, g, beta, cu_seqlens, initial_state);
  auto outputs = Function::apply(q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm, output_final_state);
  return {outputs[0], outputs[1], outputs[2]};
}

// On devices whose own path writes nowhere but to fresh memory.
std::tuple<Tensor, Tensor, Tensor> backward_into(const Tensor& grad_out, Optional grad_final_state, const Tensor& q,
                                                 const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                                 const Tensor& cu_seqlens, Optional initial_state,
                                                 const Tensor& checkpoints, double scale, bool qk_l2norm,
                                                 Tensor& grad_q, Tensor& grad_k, Tensor& grad_v) {
  static const auto op = registered_operator<Backward>("sluice::gated_delta_rule_backward");
  auto [dq, dk, dv, dg, dbeta, dstate] =
      op.call(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, initial_state, checkpoints, scale, qk_l2norm);
  grad_q.copy_(dq);
  grad_k.copy_(dk);
  grad_v.copy_(dv);
  return {dg, dbeta, dstate};
}

// On devices that have no steps: the second does all.
Tensor prepare_nothing(const Tensor&, const Tensor&, const Tensor&, const Tensor& g, const Tensor&, const Tensor&,
                       double, bool) {
  return at::empty({0}, g.options());
}

std::tuple<Tensor, Tensor> forward_prepared(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                            Optional initial_state, double scale, bool qk_l2norm,
                                            bool output_final_state) {
  static const auto op = registered_operator<Forward>("sluice::gated_delta_rule");
  auto [out, final_state, checkpoints] =
      op.call(q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm, output_final_state);
  return {out, final_state};
}

// On devices that have no steps: all of it in the first where from_zero, else in the second, which does it again for
// the gradient of a final state.
std::tuple<Tensor, std::vector<Tensor>> begin_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                       const Tensor& v, const Tensor& g, const Tensor& beta,
                                                       const Tensor& cu_seqlens, Optional initial_state, double scale,
                                                       bool qk_l2norm, bool from_zero) {
  const auto none = at::empty({0}, g.options());
  if (!from_zero) return {none, {}};
  static const auto op = registered_operator<Backward>("sluice::gated_delta_rule_backward");
  auto [dq, dk, dv, dg, dbeta, dstate] =
      op.call(grad_out, std::nullopt, q, k, v, g, beta, cu_seqlens, initial_state, none, scale, qk_l2norm);
  return {dstate, {dq, dk, dv, dg, dbeta}};
}

// That what begin_backward() kept are the gradients of these inputs, or nothing.
void check_kept(at::TensorList kept, const std::vector<std::pair<const char*, Tensor>>& inputs) {
  constexpr auto op = "gated_delta_rule_backward.finish";
  SLUICE_CHECK(kept.empty() || kept.size() == inputs.size(),
               "{}: kept must be what gated_delta_rule_backward.begin gave, no tensor or {}; got {}", op, inputs.size(),
               kept.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto& [name, input] = inputs[i];
    SLUICE_CHECK(kept[i].sizes() == input.sizes() && kept[i].scalar_type() == input.scalar_type(),
                 "{}: kept[{}] must be the gradient of {}, {}; got {}", op, i, name, describe(input),
                 describe(kept[i]));
  }
}

std::tuple<Tensor, Tensor> finish_backward(at::TensorList kept, Optional grad_final_state, const Tensor& grad_out,
                                           const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                           const Tensor& beta, const Tensor& cu_seqlens, Optional initial_state,
                                           double scale, bool qk_l2norm, Tensor& grad_q, Tensor& grad_k,
                                           Tensor& grad_v) {
  check_kept(kept, {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}});
  if (!kept.empty() && !grad_final_state) {
    grad_q.copy_(kept[0]);
    grad_k.copy_(kept[1]);
    grad_v.copy_(kept[2]);
    return {kept[3].clone(), kept[4].clone()};
  }
  auto [dg, dbeta, dstate] = backward_into(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, initial_state,
                                           at::empty({0}, g.options()), scale, qk_l2norm, grad_q, grad_k, grad_v);
  return {dg, dbeta};
}

Tensor cached_by_copy(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                      const Tensor& cu_seqlens, const Tensor& slots, Tensor& states, double scale, bool qk_l2norm) {
  const auto output = gated_delta_rule(q, k, v, g, beta, cu_seqlens, read_slots(states, slots), scale, qk_l2norm,
                                       /*output_final_state=*/true);
  write_slots(states, slots, output.final_state);
  return output.out;
}

}  // namespace

GatedDeltaOutput gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                  const Tensor& beta, const Tensor& cu_seqlens, Optional initial_state, double scale,
                                  bool qk_l2norm, bool output_final_state) {
  static const auto op = registered_operator<Forward>("sluice::gated_delta_rule");
  auto [out, final_state, checkpoints] =
      op.call(q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm, output_final_state);
  return {out, final_state, checkpoints};
}

Tensor gated_delta_rule_cached(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                               const Tensor& cu_seqlens, const Tensor& slots, Tensor& states, std::int64_t max_seqlen,
                               double scale, bool qk_l2norm) {
  if (max_seqlen > kFewTokens) return cached_by_copy(q, k, v, g, beta, cu_seqlens, slots, states, scale, qk_l2norm);
  static const auto op = registered_operator<Cached>("sluice::gated_delta_rule", "cached");
  return op.call(q, k, v, g, beta, cu_seqlens, slots, states, scale, qk_l2norm);
}

GatedDeltaGradients gated_delta_rule_backward(const Tensor& grad_out, Optional grad_final_state, const Tensor& q,
                                              const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                              const Tensor& cu_seqlens, Optional initial_state,
                                              const Tensor& checkpoints, double scale, bool qk_l2norm, Tensor& grad_q,
                                              Tensor& grad_k, Tensor& grad_v) {
  static const auto op = registered_operator<BackwardInto>("sluice::gated_delta_rule_backward", "into");
  auto [dg, dbeta, dstate] = op.call(grad_out, grad_final_state, q, k, v, g, beta, cu_seqlens, initial_state,
                                     checkpoints, scale, qk_l2norm, grad_q, grad_k, grad_v);
  return {dg, dbeta, dstate};
}

Tensor gated_delta_rule_prepare(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                const Tensor& cu_seqlens, double scale, bool qk_l2norm) {
  static const auto op = registered_operator<Prepare>("sluice::gated_delta_rule", "prepare");
  return op.call(q, k, v, g, beta, cu_seqlens, scale, qk_l2norm);
}

GatedDeltaOutput gated_delta_rule_prepared(const Tensor& prepared, const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                           Optional initial_state, double scale, bool qk_l2norm,
                                           bool output_final_state) {
  static const auto op = registered_operator<Prepared>("sluice::gated_delta_rule", "prepared");
  auto [out, final_state] =
      op.call(prepared, q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm, output_final_state);
  return {out, final_state, {}};
}

GatedDeltaBackward::GatedDeltaBackward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                       Optional initial_state, double scale, bool qk_l2norm, bool from_zero)
    : grad_out_(grad_out),
      q_(q),
      k_(k),
      v_(v),
      g_(g),
      beta_(beta),
      cu_seqlens_(cu_seqlens),
      initial_state_(initial_state),
      scale_(scale),
      qk_l2norm_(qk_l2norm) {
  static const auto op = registered_operator<BeginBackward>("sluice::gated_delta_rule_backward", "begin");
  std::tie(grad_initial_state_, kept_) =
      op.call(grad_out, q, k, v, g, beta, cu_seqlens, initial_state, scale, qk_l2norm, from_zero);
}

std::pair<Tensor, Tensor> GatedDeltaBackward::finish(Optional grad_final_state, Tensor& grad_q, Tensor& grad_k,
                                                     Tensor& grad_v) {
  static const auto op = registered_operator<FinishBackward>("sluice::gated_delta_rule_backward", "finish");
  auto [dg, dbeta] = op.call(kept_, grad_final_state, grad_out_, q_, k_, v_, g_, beta_, cu_seqlens_, initial_state_,
                             scale_, qk_l2norm_, grad_q, grad_k, grad_v);
  kept_.clear();
  return {dg, dbeta};
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def(
      "gated_delta_rule.cached(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor slots, "
      "Tensor(a!) states, float scale, bool qk_l2norm) -> Tensor out");
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, "
      "float scale, bool qk_l2norm, bool output_final_state=True) -> (Tensor out, Tensor final_state, Tensor "
      "checkpoints)");
  m.def(
      "gated_delta_rule.prepare(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, float scale, "
      "bool qk_l2norm) -> Tensor prepared");
  m.def(
      "gated_delta_rule.prepared(Tensor prepared, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor "
      "cu_seqlens, Tensor? initial_state, float scale, bool qk_l2norm, bool output_final_state) -> (Tensor out, Tensor "
      "final_state)");
  m.def(
      "gated_delta_rule_backward(Tensor grad_out, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor beta, Tensor cu_seqlens, Tensor? initial_state, Tensor checkpoints, float scale, bool qk_l2norm) -> "
      "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_g, Tensor grad_beta, Tensor grad_initial_state)");
  m.def(
      "gated_delta_rule_backward.into(Tensor grad_out, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v, Tensor "
      "g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, Tensor checkpoints, float scale, bool qk_l2norm, "
      "Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v) -> (Tensor grad_g, Tensor grad_beta, Tensor "
      "grad_initial_state)");
  m.def(
      "gated_delta_rule_backward.begin(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor "
      "cu_seqlens, Tensor? initial_state, float scale, bool qk_l2norm, bool from_zero) -> (Tensor grad_initial_state, "
      "Tensor[] kept)");
  m.def(
      "gated_delta_rule_backward.finish(Tensor[] kept, Tensor? grad_final_state, Tensor grad_out, Tensor q, Tensor k, "
      "Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, float scale, bool qk_l2norm, "
      "Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v) -> (Tensor grad_g, Tensor grad_beta)");
}
TORCH_LIBRARY_IMPL(sluice, CompositeExplicitAutograd, m) {
  m.impl("gated_delta_rule.cached", cached_by_copy);
  m.impl("gated_delta_rule.prepare", prepare_nothing);
  m.impl("gated_delta_rule.prepared", forward_prepared);
  m.impl("gated_delta_rule_backward.into", backward_into);
  m.impl("gated_delta_rule_backward.begin", begin_backward);
  m.impl("gated_delta_rule_backward.finish", finish_backward);
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) {
  m.impl("gated_delta_rule", forward_meta);
  m.impl("gated_delta_rule_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("gated_delta_rule", forward_autograd); }

}  // namespace sluice
