// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/block_indexer.h"

#include <algorithm>
#include <cmath>

#include "sluice/kernels/block_top_k/block_top_k.h"
#include "sluice/layers/choices.h"
#include "sluice/layers/pack_pieces.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

// What the index needs of the past: the keys of complete blocks, and the raw keys of each slot's open block.
struct IndexState : MixerState {
  std::int64_t block_size = 0, block_capacity = 0;  // c; blocks of each slot
  Tensor block_keys;                                // [slots * block_capacity, dI], ready for scoring
  Tensor open;                                      // [slots * (c - 1), dI], not averaged yet
  void clear(const Tensor&) override {}             // rows past a sequence's length are never read
  void copy(const Tensor& slots, const MixerState& from, const Tensor& from_slots, std::int64_t tokens) override {
    const auto& other = static_cast<const IndexState&>(from);
    const auto by_slot = [](const Tensor& rows, std::int64_t of_slot) { return rows.unflatten(0, {-1, of_slot}); };
    if (block_size > 1)
      copy_rows(by_slot(open, block_size - 1), slots, by_slot(other.open, block_size - 1), from_slots);
    const auto blocks = tokens / block_size;
    if (blocks == 0) return;
    copy_rows(by_slot(block_keys, block_capacity).narrow(1, 0, blocks), slots,
              by_slot(other.block_keys, other.block_capacity).narrow(1, 0, blocks), from_slots);
  }
};

// One sequence of the pack: tokens [past, past + length) are new; the raw keys of `past` - past % c on are at hand.
struct Span {
  std::int64_t past, length, slot, first_row;
};

std::vector<Span> spans_of(const Pack& pack) {
  std::vector<Span> spans;
  std::int64_t row = 0;
  for (std::size_t n = 0; n < pack.lengths.size(); ++n) {
    spans.push_back({.past = pack.past.empty() ? 0 : pack.past[n],
                     .length = pack.lengths[n],
                     .slot = pack.slots.empty() ? 0 : pack.slots[n],
                     .first_row = row});
    row += pack.lengths[n];
  }
  return spans;
}

// The raw keys that new blocks are made of: those of open blocks, then the pack's.
class RawKeys {
 public:
  RawKeys(const Tensor& keys, const IndexState* state, std::int64_t block_size)
      : rows_(state ? at::cat({state->open, keys}) : keys),
        open_rows_(state ? state->open.size(0) : 0),
        block_size_(block_size) {}

  // The row of a token by its position in the sequence.
  std::int64_t row(const Span& s, std::int64_t position) const {
    return position < s.past ? s.slot * (block_size_ - 1) + position % block_size_
                             : open_rows_ + s.first_row + position - s.past;
  }
  Tensor take(const std::vector<std::int64_t>& rows) const {
    return rows_.index_select(0, int64s(rows, rows_.device()));
  }

 private:
  Tensor rows_;
  std::int64_t open_rows_, block_size_;
};

}  // namespace

BlockIndexer::BlockIndexer(const BlockIndexerSizes& s)
    : sizes_(s),
      index_qk_proj_(add("index_qk_proj",
                         std::make_unique<Linear>((s.num_heads + 1) * s.head_dim, s.hidden_size, s.initializer_range))),
      q_layernorm_(add("q_layernorm", std::make_unique<ZeroCenteredRmsNorm>(s.head_dim, s.rms_norm_eps))),
      k_layernorm_(add("k_layernorm", std::make_unique<ZeroCenteredRmsNorm>(s.head_dim, s.rms_norm_eps))) {
  for (auto* parameter : parameters()) parameter->frozen = true;
}

std::optional<Tensor> BlockIndexer::choose(const Tensor& x, const ForwardContext& context, MixerState* state) const {
  const at::NoGradGuard no_grad;
  auto* cache = static_cast<IndexState*>(state);
  const auto& pack = context.pack;
  const auto c = sizes_.block_size, top_k = sizes_.budget / c, width = sizes_.num_heads * sizes_.head_dim;
  const auto spans = spans_of(pack);
  const bool sparse = std::ranges::any_of(spans, [&](const Span& s) { return (s.past + s.length) / c > top_k; });
  auto* record = context.replay.key_blocks;
  if (!sparse && record != nullptr && !record->takes()) {  // all blocks: nothing that another pass could do otherwise
    record->keep(at::full({x.size(0), top_k}, -1, x.options().dtype(kInt)), context);
  }
  if (!sparse && cache == nullptr) return std::nullopt;

  const auto& ranks = context.mesh.cp();
  const auto pieces = pieces_of(pack, ranks.size());
  const auto& own = pieces[ranks.rank()];  // whose tokens are the queries; keys are of the whole pack
  const auto qk = index_qk_proj_.forward(x);
  const RawKeys raw(all_gather_rows(qk.narrow(1, width, sizes_.head_dim), context.split.context_rows, ranks), cache, c);
  std::vector<std::int64_t> members, starts, first_block{0};  // of the blocks that the new tokens complete
  for (const auto& s : spans) {
    const auto end = s.past + s.length;
    for (auto start = s.past / c * c; start + c <= end; start += c) {
      starts.push_back(start);
      for (auto t = start; t < start + c; ++t) members.push_back(raw.row(s, t));
    }
    first_block.push_back(static_cast<std::int64_t>(starts.size()));
  }
  const auto pooled = raw.take(members).view({-1, c, sizes_.head_dim}).to(kFloat).mean(1).to(x.scalar_type());
  const auto table = rotary_table(int64s(starts, x.device()), sizes_.rotary_theta, sizes_.rotary_dim);
  auto block_keys = rotary(k_layernorm_.forward(pooled).unsqueeze(1), table.cos, table.sin).squeeze(1);  // [B, dI]
  auto cu_blocks = first_block;

  if (cache != nullptr) {
    std::vector<std::int64_t> open_from, open_to;
    for (std::size_t n = 0; n < spans.size(); ++n) {
      const auto& s = spans[n];
      const auto count = first_block[n + 1] - first_block[n], end = s.past + s.length;
      cu_blocks[n] = s.slot * cache->block_capacity;
      cache->block_keys.narrow(0, cu_blocks[n] + s.past / c, count).copy_(block_keys.narrow(0, first_block[n], count));
      for (auto t = end / c * c; t < end; ++t) {
        open_from.push_back(raw.row(s, t));
        open_to.push_back(s.slot * (c - 1) + t % c);
      }
    }
    cu_blocks.back() = cache->block_keys.size(0);
    cache->open.index_copy_(0, int64s(open_to, x.device()), raw.take(open_from));
    block_keys = cache->block_keys;
  }
  if (!sparse) return std::nullopt;
  std::vector<std::int64_t> own_blocks, used;  // of the queries' sequences: where their blocks begin; their keys so far
  for (std::size_t i = 0; i < own.lengths.size(); ++i) {
    const auto n = own.first_sequence + static_cast<std::int64_t>(i);
    own_blocks.push_back(cu_blocks[n]);
    used.push_back(spans[n].past + (i == 0 ? own.begun : 0) + own.lengths[i]);
  }
  own_blocks.push_back(cu_blocks.back());
  const auto first = context.split.context_first;
  const auto q = rotary(q_layernorm_.forward(qk.narrow(1, 0, width).unflatten(1, {sizes_.num_heads, sizes_.head_dim})),
                        context.rotary.cos.narrow(0, first, x.size(0)),
                        context.rotary.sin.narrow(0, first, x.size(0)));  // [T, nI, dI]
  auto live = block_top_k(q, block_keys, cu_seqlens_of(pack, own.lengths), int32s(own_blocks, x.device()),
                          int32s(used, x.device()), c, top_k, 1 / std::sqrt(static_cast<double>(sizes_.head_dim)));
  if (record == nullptr) return live;
  if (!record->takes()) {
    record->keep(live, context);
    return live;
  }
  const auto complete = (context.pack.positions.narrow(0, first, x.size(0)) + 1).floor_divide(c);  // blocks it sees
  return record->follow(live, complete.unsqueeze(1), ChoiceOrder::kRising, context);
}

std::unique_ptr<MixerState> BlockIndexer::new_state(std::int64_t slots, std::int64_t capacity,
                                                    const at::TensorOptions& activations) const {
  auto state = std::make_unique<IndexState>();
  state->block_size = sizes_.block_size;
  state->block_capacity = capacity / sizes_.block_size;
  state->block_keys = at::empty({slots * state->block_capacity, sizes_.head_dim}, activations);
  state->open = at::empty({slots * (sizes_.block_size - 1), sizes_.head_dim}, activations);
  return state;
}

double BlockIndexer::attended(std::int64_t length) const {
  const auto c = sizes_.block_size;
  double keys = 0;
  for (std::int64_t seen = 1; seen <= length; ++seen) {
    keys += static_cast<double>(std::min(seen / c * c, sizes_.budget) + seen % c);
  }
  return keys;
}

// Nothing where every sequence is within the budget; a token within it takes its blocks without a score.
void BlockIndexer::count_operations(std::span<const std::int64_t> lengths, Operations& operations) const {
  double tokens = 0, scores = 0;
  for (const auto length : lengths) {
    tokens += static_cast<double>(length);
    for (auto seen = sizes_.budget + sizes_.block_size; seen <= length; ++seen) {
      const auto blocks = seen / sizes_.block_size;
      scores += static_cast<double>(blocks);
    }
  }
  if (scores == 0) return;
  operations["softmax attention, indexer"] +=
      index_qk_proj_.operations(tokens) + 2 * scores * static_cast<double>(sizes_.num_heads * sizes_.head_dim);
}

}  // namespace sluice
