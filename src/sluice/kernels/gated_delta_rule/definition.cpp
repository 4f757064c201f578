// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"

namespace sluice {

GatedDeltaOutput gated_delta_rule_definition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                             const Tensor& beta, const Tensor& cu_seqlens,
                                             const std::optional<Tensor>& initial_state, double scale, bool qk_l2norm,
                                             bool output_final_state) {
  const auto type = v.scalar_type() == kDouble ? kDouble : kFloat;
  const auto heads = v.size(1), group = heads / q.size(1);
  const auto unit = [&](const Tensor& x) {
    const auto wide = x.to(type);
    return qk_l2norm ? wide * (wide.square().sum(-1, true) + 1e-6).rsqrt() : wide;
  };
  const auto queries = unit(q).repeat_interleave(group, 1) * scale;  // [T, Hv, K]
  const auto keys = unit(k).repeat_interleave(group, 1);             // [T, Hv, K]
  const auto values = v.to(type), decay = g.to(type).exp(), strength = beta.to(type);
  std::vector<Tensor> outputs, states;
  const auto bounds = sequence_bounds(cu_seqlens);
  for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
    auto state = initial_state ? initial_state->select(0, static_cast<std::int64_t>(n)).to(type)
                               : at::zeros({heads, q.size(2), v.size(2)}, values.options());  // [Hv, K, V]
    for (auto t = bounds[n]; t < bounds[n + 1]; ++t) {
      state = state * decay[t].view({heads, 1, 1});
      const auto predicted = at::einsum("hkv,hk->hv", {state, keys[t]});
      const auto written = strength[t].unsqueeze(1) * (values[t] - predicted);  // [Hv, V]
      state = state + at::einsum("hk,hv->hkv", {keys[t], written});
      outputs.push_back(at::einsum("hkv,hk->hv", {state, queries[t]}));
    }
    if (output_final_state) states.push_back(state);
  }
  const auto out = outputs.empty() ? at::zeros_like(v) : at::stack(outputs).to(v.scalar_type());
  return {out, states.empty() ? at::zeros({0, heads, q.size(2), v.size(2)}, values.options()) : at::stack(states), {}};
}

}  // namespace sluice
