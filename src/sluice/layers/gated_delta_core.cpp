// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_delta_core.h"

#include <torch/custom_class.h>

#include <cmath>

#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/delta_gates/delta_gates.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"
#include "sluice/layers/linked_delta_rule.h"
#include "sluice/layers/pack_pieces.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;

// What the backward pass takes besides tensors.
struct Saved : torch::CustomClassHolder {
  Saved(const GatedDeltaCoreSizes& s, const Group& group, const Pack& pack)
      : sizes(s), ranks(group), pieces(pieces_of(pack, group.size())) {}
  GatedDeltaCoreSizes sizes;
  Group ranks;
  std::vector<PackPiece> pieces;
  DeltaLinks links;
  Lookback lookback(const Tensor& conv_weight) const { return {pieces, conv_weight.size(2) - 1, ranks}; }
};

// The parts of a projection, or of its gradient, as views.
struct ProjectionParts {
  Tensor qkv;   // [T, 2 Kd + Vd]
  Tensor z;     // [T, Hv, V]
  Tensor b, a;  // [T, Hv]
};
ProjectionParts parts_of(const Tensor& projection, const GatedDeltaCoreSizes& s) {
  const auto value_width = s.num_value_heads * s.value_head_dim;
  const auto qkv_width = 2 * s.num_key_heads * s.key_head_dim + value_width, z_end = qkv_width + value_width;
  return {projection.narrow(1, 0, qkv_width),
          projection.narrow(1, qkv_width, value_width).unflatten(1, {s.num_value_heads, s.value_head_dim}),
          projection.narrow(1, z_end, s.num_value_heads),
          projection.narrow(1, z_end + s.num_value_heads, s.num_value_heads)};
}

// Of the convolution's output [T, 2 Kd + Vd], likewise.
struct Heads {
  Tensor q, k;  // [T, Hk, K]
  Tensor v;     // [T, Hv, V]
};
Heads heads_of(const Tensor& qkv, const GatedDeltaCoreSizes& s) {
  const auto key_width = s.num_key_heads * s.key_head_dim;
  const auto parts = qkv.split_with_sizes({key_width, key_width, s.num_value_heads * s.value_head_dim}, 1);
  return {parts[0].unflatten(1, {s.num_key_heads, s.key_head_dim}),
          parts[1].unflatten(1, {s.num_key_heads, s.key_head_dim}),
          parts[2].unflatten(1, {s.num_value_heads, s.value_head_dim})};
}

double scale_of(const GatedDeltaCoreSizes& s) { return 1 / std::sqrt(static_cast<double>(s.key_head_dim)); }

std::optional<Tensor> optional_of(const Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// The convolution's state before a piece, [N, C, W - 1], of the rows before its first sequence; none: zeros.
std::optional<Tensor> conv_state_of(const Tensor& rows, const Tensor& conv_weight, std::int64_t sequences) {
  if (rows.size(0) == 0) return std::nullopt;
  const auto reach = conv_weight.size(2) - 1;
  auto state = at::zeros({sequences, rows.size(1), reach}, rows.options());
  state[0].narrow(1, reach - rows.size(0), rows.size(0)).copy_(rows.t());
  return state;
}

class Core : public torch::autograd::Function<Core> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& projection,
                                                const Tensor& conv_weight, const Tensor& A_log, const Tensor& dt_bias,
                                                const Tensor& norm_weight, const Pack& pack,
                                                const c10::intrusive_ptr<Saved>& kept) {
    const at::AutoDispatchBelowAutograd below;
    const auto& sizes = kept->sizes;
    const auto& own = kept->pieces[kept->ranks.rank()];
    const auto cu_seqlens = cu_seqlens_of(pack, own.lengths);
    const auto in = parts_of(projection, sizes);
    const auto before = conv_state_of(kept->lookback(conv_weight).rows(in.qkv), conv_weight,
                                      static_cast<std::int64_t>(own.lengths.size()));
    const auto conv = causal_conv(in.qkv, conv_weight, cu_seqlens, before, /*silu=*/true);
    const auto heads = heads_of(conv.out, sizes);
    const auto gates = delta_gates(in.a, in.b, A_log, dt_bias);
    auto delta = linked_delta_rule({heads.q, heads.k, heads.v, gates.g, gates.beta}, pack, kept->pieces, kept->ranks,
                                   scale_of(sizes));
    const auto out = gated_rms_norm(delta.out, in.z, norm_weight, sizes.rms_norm_eps, sizes.output_gate).flatten(1);
    context->save_for_backward({projection, conv_weight, A_log, dt_bias, norm_weight, cu_seqlens,
                                before.value_or(Tensor()), conv.out, gates.g, gates.beta, delta.out});
    kept->links = std::move(delta.links);
    context->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return {out};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto& [projection, conv_weight, A_log, dt_bias, norm_weight, cu_seqlens] =
        std::tie(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]);
    const auto conv_state = optional_of(saved[6]);
    const auto& [conv_out, g, beta, delta_out] = std::tie(saved[7], saved[8], saved[9], saved[10]);
    const auto kept = c10::static_intrusive_pointer_cast<Saved>(context->saved_data["kept"].toCapsule());
    const auto& sizes = kept->sizes;
    const auto links = std::move(kept->links);  // which go when they have been used
    const at::AutoDispatchBelowAutograd below;

    // Every gradient takes the place of its value, which nobody reads any more.
    auto in = parts_of(projection, sizes);
    const auto heads = heads_of(conv_out, sizes);
    auto grad_delta_out = delta_out;
    const auto grad_norm_weight = gated_rms_norm_backward(grads[0].view_as(delta_out), delta_out, in.z, norm_weight,
                                                          sizes.rms_norm_eps, sizes.output_gate, grad_delta_out, in.z);
    DeltaInputs delta{heads.q, heads.k, heads.v, g, beta};
    const auto gates =
        linked_delta_rule_backward(grad_delta_out, delta, links, kept->pieces, kept->ranks, scale_of(sizes));
    const auto gate_weights = delta_gates_backward(gates.g, gates.beta, in.a, in.b, A_log, dt_bias, in.a, in.b);
    const auto conv = causal_conv_backward(conv_out, std::nullopt, in.qkv, conv_weight, cu_seqlens, conv_state,
                                           /*silu=*/true, in.qkv);
    const auto lookback = kept->lookback(conv_weight);
    const auto rows = lookback.count(), reach = conv_weight.size(2) - 1;
    lookback.add_gradient(rows > 0 ? conv.initial_state[0].narrow(1, reach - rows, rows).t() : Tensor(), in.qkv);
    for (const auto& overwritten : {projection, delta_out, conv_out}) overwritten.unsafeGetTensorImpl()->bump_version();
    return {projection.detach(),
            conv.weight,
            gate_weights.A_log,
            gate_weights.dt_bias,
            grad_norm_weight,
            Tensor(),
            Tensor()};
  }
};

}  // namespace

Tensor gated_delta_core(const Tensor& projection, const GatedDeltaCoreWeights& weights, const Pack& pack,
                        const Group& ranks, const GatedDeltaCoreSizes& sizes) {
  return Core::apply(projection, weights.conv, weights.A_log, weights.dt_bias, weights.norm, pack,
                     c10::make_intrusive<Saved>(sizes, ranks, pack))[0];
}

Tensor gated_delta_core_cached(const Tensor& projection, const GatedDeltaCoreWeights& weights, const Pack& pack,
                               GatedDeltaCoreStates& states, const GatedDeltaCoreSizes& sizes) {
  const auto in = parts_of(projection, sizes);
  const auto conv = causal_conv_cached(in.qkv, weights.conv, pack.cu_seqlens, pack.slot_index, states.conv,
                                       pack.longest(), /*silu=*/true);
  const auto heads = heads_of(conv, sizes);
  const auto gates = delta_gates(in.a, in.b, weights.A_log, weights.dt_bias);
  const auto out =
      gated_delta_rule_cached(heads.q, heads.k, heads.v, gates.g, gates.beta, pack.cu_seqlens, pack.slot_index,
                              states.recurrent, pack.longest(), scale_of(sizes), /*qk_l2norm=*/true);
  return gated_rms_norm(out, in.z, weights.norm, sizes.rms_norm_eps, sizes.output_gate).flatten(1);
}

}  // namespace sluice
