// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/gated_attention.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "sluice/kernels/attention/attention.h"
#include "sluice/layers/context_attention.h"
#include "sluice/layers/tensor_parallel.h"

namespace sluice {
namespace {

// Keys and values of every slot, each slot in a slab of its own: `capacity` rows from slot * capacity on.
struct KeyValueState : MixerState {
  std::int64_t capacity = 0;
  Tensor k, v;                           // [slots * capacity, Hkv, d]
  std::unique_ptr<MixerState> index;     // the indexer's, where there is one
  void clear(const Tensor&) override {}  // rows past a sequence's length are never read
  void copy(const Tensor& slots, const MixerState& from, const Tensor& from_slots, std::int64_t tokens) override {
    const auto& other = static_cast<const KeyValueState&>(from);
    const auto first = [&](const Tensor& rows, std::int64_t of_slot) {  // [slots, tokens, Hkv, d]
      return rows.unflatten(0, {-1, of_slot}).narrow(1, 0, tokens);
    };
    copy_rows(first(k, capacity), slots, first(other.k, other.capacity), from_slots);
    copy_rows(first(v, capacity), slots, first(other.v, other.capacity), from_slots);
    if (index) index->copy(slots, *other.index, from_slots, tokens);
  }

  // Appends the pack's keys and values to their slots.
  void append(const Pack& pack, const Tensor& new_k, const Tensor& new_v) {
    assert(longest(pack) <= capacity);
    const auto place = pack.row_slots * capacity + pack.positions;
    k.index_copy_(0, place, new_k);
    v.index_copy_(0, place, new_v);
  }

  // Where the keys of the pack's sequences begin, and how many there are.
  SeenKeys seen_by(const Pack& pack) const {
    const auto begin = at::constant_pad_nd(pack.slot_index * capacity, {0, 1}, k.size(0)).to(kInt);
    return {.k = k, .v = v, .cu_seqlens = begin, .seqused = pack.seen, .longest = longest(pack)};
  }

 private:
  static std::int64_t longest(const Pack& pack) {
    std::int64_t most = 0;
    for (std::size_t n = 0; n < pack.past.size(); ++n) most = std::max(most, pack.past[n] + pack.lengths[n]);
    return most;
  }
};

}  // namespace

GatedAttention::GatedAttention(const GatedAttentionSizes& s, std::unique_ptr<BlockIndexer> indexer)
    : sizes_(s),
      q_proj_(add("q_proj", std::make_unique<Linear>(2 * s.num_attention_heads * s.head_dim, s.hidden_size,
                                                     s.initializer_range, Split::heads(0, s.num_attention_heads)))),
      k_proj_(
          add("k_proj", std::make_unique<Linear>(s.num_key_value_heads * s.head_dim, s.hidden_size, s.initializer_range,
                                                 Split::key_value_heads(0, s.num_key_value_heads)))),
      v_proj_(
          add("v_proj", std::make_unique<Linear>(s.num_key_value_heads * s.head_dim, s.hidden_size, s.initializer_range,
                                                 Split::key_value_heads(0, s.num_key_value_heads)))),
      o_proj_(add("o_proj", std::make_unique<Linear>(s.hidden_size, s.num_attention_heads * s.head_dim,
                                                     s.initializer_range, Split::heads(1, s.num_attention_heads)))),
      q_norm_(add("q_norm", std::make_unique<ZeroCenteredRmsNorm>(s.head_dim, s.rms_norm_eps))),
      k_norm_(add("k_norm", std::make_unique<ZeroCenteredRmsNorm>(s.head_dim, s.rms_norm_eps))),
      indexer_(indexer ? &add("indexer", std::move(indexer)) : nullptr) {}

Tensor GatedAttention::forward(const Tensor& own, const ForwardContext& context, MixerState* state) const {
  const auto& pack = context.pack;
  const auto d = sizes_.head_dim;
  const auto [x, y] = column_parallel(own, {&q_proj_, &k_proj_, &v_proj_}, context);  // x: [T, D]
  const auto cos = context.rotary.cos.narrow(0, context.split.context_first, x.size(0));
  const auto sin = context.rotary.sin.narrow(0, context.split.context_first, x.size(0));
  const auto query_and_gate = y[0].unflatten(1, {-1, 2 * d});
  const auto gate = query_and_gate.narrow(2, d, d);                                  // [T, Hq, d]
  const auto q = rotary(q_norm_.forward(query_and_gate.narrow(2, 0, d)), cos, sin);  // [T, Hq, d]
  const auto k = rotary(k_norm_.forward(y[1].unflatten(1, {-1, d})), cos, sin);      // [T, Hkv, d]
  const auto v = y[2].unflatten(1, {-1, d});
  const auto scale = 1 / std::sqrt(static_cast<double>(d));

  auto* cache = static_cast<KeyValueState*>(state);
  KeyBlocks blocks;
  if (indexer_ != nullptr) {
    blocks = {.chosen = indexer_->choose(x, context, cache ? cache->index.get() : nullptr),
              .size = indexer_->block_size()};
  }
  Tensor out;  // [T, Hq, d]
  if (cache != nullptr) {
    cache->append(pack, k, v);
    out = attend(q, pack.cu_seqlens, pack.longest(), cache->seen_by(pack), blocks, scale);
  } else {
    out = context_attention(q, k, v, blocks, context, scale);
  }
  return row_parallel((out * gate.sigmoid()).flatten(1), o_proj_, context);
}

std::unique_ptr<MixerState> GatedAttention::new_state(std::int64_t slots, std::int64_t capacity,
                                                      const at::TensorOptions& activations) const {
  auto state = std::make_unique<KeyValueState>();
  state->capacity = capacity;
  state->k = at::empty({slots * capacity, sizes_.num_key_value_heads, sizes_.head_dim}, activations);
  state->v = at::empty_like(state->k);
  if (indexer_ != nullptr) state->index = indexer_->new_state(slots, capacity, activations);
  return state;
}

std::string GatedAttention::why_not_on_gpu(at::ScalarType) const { return ""; }

// An indexer makes lists on the host.
bool GatedAttention::is_recordable() const {
  return indexer_ == nullptr && attention_never_waits(q_proj_.weight().scalar_type(), sizes_.head_dim, sizes_.head_dim);
}

// A query multiplies with the keys and values that it attends to: itself and those before it, or what its indexer
// takes.
void GatedAttention::count_operations(std::span<const std::int64_t> lengths, Operations& operations) const {
  double tokens = 0, pairs = 0;
  for (const auto length : lengths) {
    const auto own = static_cast<double>(length);
    tokens += own;
    pairs += indexer_ != nullptr ? indexer_->attended(length) : own * (own + 1) / 2;
  }
  for (const auto* projection : {&q_proj_, &k_proj_, &v_proj_, &o_proj_}) {
    operations["softmax attention, projections"] += projection->operations(tokens);
  }
  operations["softmax attention, scores and values"] +=
      2 * 2.0 * pairs * static_cast<double>(sizes_.num_attention_heads * sizes_.head_dim);
  if (indexer_ != nullptr) indexer_->count_operations(lengths, operations);
}

}  // namespace sluice
