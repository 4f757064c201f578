// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_attention.h"

#include <cassert>
#include <cmath>

#include "sluice/kernels/attention/attention.h"

namespace sluice {
namespace {

// Keys and values of every slot, each slot in a slab of its own: `capacity` rows from slot * capacity on.
struct KeyValueState : MixerState {
  std::int64_t capacity = 0;
  Tensor k, v;                          // [slots * capacity, Hkv, d]
  void clear(std::int64_t) override {}  // rows past a sequence's length are never read

  // Appends the pack's keys and values to their slots.
  void append(const Pack& pack, const Tensor& new_k, const Tensor& new_v) {
    std::int64_t row = 0;
    for (std::size_t n = 0; n < pack.lengths.size(); ++n) {
      const auto first = pack.slots[n] * capacity + pack.past[n], length = pack.lengths[n];
      assert(pack.past[n] + length <= capacity);
      k.narrow(0, first, length).copy_(new_k.narrow(0, row, length));
      v.narrow(0, first, length).copy_(new_v.narrow(0, row, length));
      row += length;
    }
  }

  // Where the keys of the pack's sequences begin, and how many each has: cu_seqlens_k [N + 1] and seqused_k [N].
  std::pair<Tensor, Tensor> extents(const Pack& pack) const {
    std::vector<std::int32_t> begin, used;
    for (std::size_t n = 0; n < pack.slots.size(); ++n) {
      begin.push_back(static_cast<std::int32_t>(pack.slots[n] * capacity));
      used.push_back(static_cast<std::int32_t>(pack.past[n] + pack.lengths[n]));
    }
    begin.push_back(static_cast<std::int32_t>(k.size(0)));
    const auto i32 = at::TensorOptions().dtype(kInt);
    return {at::tensor(begin, i32), at::tensor(used, i32)};
  }
};

}  // namespace

GatedAttention::GatedAttention(const GatedAttentionSizes& s)
    : sizes_(s),
      q_proj_(add("q_proj", std::make_unique<Linear>(2 * s.num_attention_heads * s.head_dim, s.hidden_size,
                                                     s.initializer_range))),
      k_proj_(add("k_proj",
                  std::make_unique<Linear>(s.num_key_value_heads * s.head_dim, s.hidden_size, s.initializer_range))),
      v_proj_(add("v_proj",
                  std::make_unique<Linear>(s.num_key_value_heads * s.head_dim, s.hidden_size, s.initializer_range))),
      o_proj_(add("o_proj",
                  std::make_unique<Linear>(s.hidden_size, s.num_attention_heads * s.head_dim, s.initializer_range))),
      q_norm_(add("q_norm", std::make_unique<ZeroCenteredRmsNorm>(s.head_dim, s.rms_norm_eps))),
      k_norm_(add("k_norm", std::make_unique<ZeroCenteredRmsNorm>(s.head_dim, s.rms_norm_eps))) {}

Tensor GatedAttention::forward(const Tensor& x, const ForwardContext& context, MixerState* state) const {
  const auto& [pack, table] = context;
  const auto d = sizes_.head_dim;
  const auto query_and_gate = q_proj_.forward(x).unflatten(1, {sizes_.num_attention_heads, 2 * d});
  const auto gate = query_and_gate.narrow(2, d, d);                                              // [T, Hq, d]
  const auto q = rotary(q_norm_.forward(query_and_gate.narrow(2, 0, d)), table.cos, table.sin);  // [T, Hq, d]
  const auto k = rotary(k_norm_.forward(k_proj_.forward(x).unflatten(1, {sizes_.num_key_value_heads, d})), table.cos,
                        table.sin);  // [T, Hkv, d]
  const auto v = v_proj_.forward(x).unflatten(1, {sizes_.num_key_value_heads, d});
  const auto scale = 1 / std::sqrt(static_cast<double>(d));

  Tensor out;  // [T, Hq, d]
  if (auto* cache = static_cast<KeyValueState*>(state)) {
    cache->append(pack, k, v);
    const auto [cu_seqlens_k, seqused_k] = cache->extents(pack);
    out = attention(q, cache->k, cache->v, pack.cu_seqlens, cu_seqlens_k, seqused_k, scale);
  } else {
    out = attention(q, k, v, pack.cu_seqlens, pack.cu_seqlens, std::nullopt, scale);
  }
  return o_proj_.forward((out * gate.sigmoid()).flatten(1));
}

std::unique_ptr<MixerState> GatedAttention::new_state(std::int64_t slots, std::int64_t capacity,
                                                      at::ScalarType dtype) const {
  auto state = std::make_unique<KeyValueState>();
  state->capacity = capacity;
  const auto options = at::TensorOptions().dtype(dtype);
  state->k = at::empty({slots * capacity, sizes_.num_key_value_heads, sizes_.head_dim}, options);
  state->v = at::empty_like(state->k);
  return state;
}

}  // namespace sluice
