// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/per_layer_embedding.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/common/slots.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

struct PerLayerEmbeddingState : MixerState {
  Tensor history;  // [slots, N - 1] int64, oldest first: token ids
  Tensor conv;     // [slots, n D, (kernel - 1) N], oldest first
  std::int64_t eos_token_id = 0;
  void clear(const Tensor& slots) override {
    history.index_fill_(0, slots, eos_token_id);
    conv.index_fill_(0, slots, 0);
  }
  void copy(const Tensor& slots, const MixerState& from, const Tensor& from_slots, std::int64_t) override {
    const auto& other = static_cast<const PerLayerEmbeddingState&>(from);
    copy_rows(history, slots, other.history, from_slots);
    copy_rows(conv, slots, other.conv, from_slots);
  }
};

// rows [R] of a table that lies in equal pieces, to [R, width] in the table's dtype.
Tensor gather_rows(const std::vector<Tensor>& pieces, const std::vector<std::int64_t>& rows) {
  const auto each = pieces[0].size(0), width = pieces[0].size(1);
  const auto bytes = static_cast<std::size_t>(width) * pieces[0].element_size();
  const auto count = static_cast<std::int64_t>(rows.size());
  auto out = at::empty({count, width}, pieces[0].options());
  std::vector<const std::byte*> data;
  for (const auto& piece : pieces) data.push_back(static_cast<const std::byte*>(piece.const_data_ptr()));
  auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
  at::parallel_for(0, count, 64, [&](std::int64_t first, std::int64_t last) {  // a row may be a read from the disk
    for (auto i = first; i < last; ++i) {
      std::memcpy(to + i * bytes, data[rows[i] / each] + rows[i] % each * bytes, bytes);
    }
  });
  return out;
}

struct ConvOutput {
  Tensor out;      // [T, C]
  Tensor history;  // [N, C, R]: the last R of each sequence's inputs, oldest first
};

// causal_conv over every `dilation`-th token, then silu. That is a convolution of each of a sequence's `dilation`
// interleaved parts alone: the tokens i, i + dilation, .. with the rows i, i + dilation, .. of its history before them.
// history [N, C, R], R = (W - 1) dilation, or none: zeros.
ConvOutput dilated_causal_conv(const Tensor& x, const Tensor& weight, const std::vector<std::int64_t>& lengths,
                               const std::optional<Tensor>& history, std::int64_t dilation) {
  const auto reach = (weight.size(2) - 1) * dilation;
  std::vector<std::int64_t> order, kept;  // tokens by part; of [histories | x] the rows that become the next history
  std::vector<std::int64_t> bounds{0};
  const auto histories = static_cast<std::int64_t>(lengths.size()) * reach;
  std::int64_t begin = 0;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const auto length = lengths[n], own = static_cast<std::int64_t>(n) * reach;
    for (std::int64_t part = 0; part < dilation; ++part) {
      for (auto i = part; i < length; i += dilation) order.push_back(begin + i);
      bounds.push_back(static_cast<std::int64_t>(order.size()));
    }
    for (auto i = length - reach; i < length; ++i) {
      kept.push_back(i < 0 ? own + reach + i : histories + begin + i);
    }
    begin += length;
  }
  const auto index = int64s(order, x.device());
  const auto cu_seqlens = int32s(bounds, x.device());
  std::optional<Tensor> parts;  // [N dilation, C, W - 1]
  if (history) parts = history->unflatten(2, {weight.size(2) - 1, dilation}).permute({0, 3, 1, 2}).flatten(0, 1);
  const auto out = causal_conv(x.index_select(0, index), weight, cu_seqlens, parts, /*silu=*/true).out;
  const auto place = at::empty_like(index).scatter_(0, index, at::arange(index.numel(), index.options()));
  ConvOutput result{.out = out.index_select(0, place), .history = Tensor()};
  if (history) {
    const auto rows = at::cat({history->transpose(1, 2).flatten(0, 1), x});
    const auto last = rows.index_select(0, int64s(kept, x.device()));
    result.history = last.view({-1, reach, x.size(1)}).transpose(1, 2).contiguous();
  }
  return result;
}

Parameter constants(const char* name, const std::vector<std::int64_t>& values) {
  return {.name = name,
          .shape = {static_cast<std::int64_t>(values.size())},
          .dtype = kLong,
          .decay = false,
          .frozen = true,
          .init = Init::exactly(values)};
}

}  // namespace

NgramEmbedding::NgramEmbedding(const NgramHashSizes& sizes, std::int64_t embedding_size, double initializer_range)
    : hash_(sizes),
      layer_multipliers_(declare(constants("layer_multipliers", hash_.multipliers()))),
      ngram_heads_vocab_sizes_(declare(constants("ngram_heads_vocab_sizes", hash_.primes()))),
      ngram_heads_offsets_(declare(constants("ngram_heads_offsets", hash_.offsets()))),
      table_(declare({.name = "ngram_embedding.weight",
                      .shape = {hash_.table_rows(), embedding_size / hash_.heads()},
                      .decay = false,
                      .frozen = true,
                      .as_stored = true,
                      .init = Init::normal(initializer_range)})) {}

Tensor NgramEmbedding::forward(const Tensor& tokens, const Pack& pack, const PackPiece& piece, Tensor* history,
                               const at::TensorOptions& activations, const Group& readers) const {
  if (tokens.is_meta()) {  // there are no rows to find
    const auto found = at::empty({piece.count, table_.shape[1] * hash_.heads()}, activations);
    std::vector<std::int64_t> even;
    for (std::int64_t i = 0; i < readers.size(); ++i) {
      even.push_back(piece_begin(piece.count, readers.size(), i + 1) - piece_begin(piece.count, readers.size(), i));
    }
    return all_to_all_rows(found, even, even, readers);
  }
  const auto ids = tokens.to(at::kCPU).contiguous();
  const auto* token = ids.const_data_ptr<std::int64_t>() + piece.first;
  const auto context = hash_.context(), heads = hash_.heads();
  std::vector<std::int64_t> rows(piece.count * heads), sequence;
  auto* row = rows.data();
  for (std::size_t i = 0; i < piece.lengths.size(); ++i) {
    const auto length = piece.lengths[i];
    auto* past = history ? history->mutable_data_ptr<std::int64_t>() + pack.slots[i] * context : nullptr;
    sequence.assign(past, past ? past + context : nullptr);
    const auto begun = i == 0 ? std::min(piece.begun, context) : 0;  // tokens of the piece before
    sequence.insert(sequence.end(), token - begun, token + length);
    const auto before = static_cast<std::int64_t>(sequence.size()) - length;
    for (std::int64_t t = 0; t < length; ++t, row += heads) {
      hash_.rows(std::span(sequence).first(before + t + 1), std::span(row, heads));
    }
    token += length;
    if (past != nullptr) std::copy(sequence.end() - context, sequence.end(), past);
  }
  const auto found = readers.size() == 1 ? read(rows, activations) : read_by_ranks(rows, activations, readers);
  return found.view({piece.count, table_.shape[1] * heads});
}

Tensor NgramEmbedding::read(const std::vector<std::int64_t>& rows, const at::TensorOptions& activations) const {
  const auto pieces = table_.value.defined() ? std::vector{table_.value} : table_.pieces;
  const auto found = gather_rows(pieces, rows);
  return (table_.stored_scale == 1 ? found : found.to(kFloat) * table_.stored_scale).to(activations);
}

// Numbers go to the ranks that read them, rows come back.
Tensor NgramEmbedding::read_by_ranks(const std::vector<std::int64_t>& rows, const at::TensorOptions& activations,
                                     const Group& readers) const {
  const auto numbers = at::tensor(rows, kLong);
  std::vector<std::int64_t> ends;
  for (std::int64_t rank = 1; rank < readers.size(); ++rank) {
    ends.push_back(piece_begin(table_.shape[0], readers.size(), rank));
  }
  const auto reader = at::bucketize(numbers, at::tensor(ends, kLong), /*out_int32=*/false, /*right=*/true);
  const auto order = reader.argsort(/*stable=*/true);
  const auto counts = reader.bincount({}, readers.size());
  const std::vector<std::int64_t> asks(counts.const_data_ptr<std::int64_t>(),
                                       counts.const_data_ptr<std::int64_t>() + counts.numel());
  std::vector<std::int64_t> asked;
  for (const auto& its : all_gather_numbers(asks, readers)) asked.push_back(its[readers.rank()]);
  const auto wanted = all_to_all_rows(numbers.index_select(0, order), asks, asked, readers);
  const auto* first = wanted.const_data_ptr<std::int64_t>();
  const auto found = read(std::vector<std::int64_t>(first, first + wanted.numel()), activations);
  const auto back = all_to_all_rows(found, asked, asks, readers);
  const auto place = at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()));
  return back.index_select(0, place.to(back.device()));
}

PerLayerEmbedding::PerLayerEmbedding(const PerLayerEmbeddingSizes& s)
    : sizes_(s),
      ple_embedding_(
          add("ple_embedding", std::make_unique<NgramEmbedding>(s.hash, s.embedding_size, s.initializer_range))),
      key_proj_(
          add("key_proj", std::make_unique<Linear>(s.streams * s.hidden_size, s.embedding_size, s.initializer_range))),
      value_proj_(add("value_proj", std::make_unique<Linear>(s.hidden_size, s.embedding_size, s.initializer_range))),
      norm_key_(add("norm_key", std::make_unique<GroupedRmsNorm>(s.streams, s.hidden_size, s.rms_norm_eps))),
      norm_query_(add("norm_query", std::make_unique<GroupedRmsNorm>(s.streams, s.hidden_size, s.rms_norm_eps))),
      norm_conv_(add("norm_conv", std::make_unique<GroupedRmsNorm>(s.streams, s.hidden_size, s.rms_norm_eps))),
      conv_weight_(declare({.name = "conv1d.weight",
                            .shape = {s.streams * s.hidden_size, 1, s.conv_kernel_dim},
                            .init = Init::constant(0)})) {}

Tensor PerLayerEmbedding::forward(const Tensor& streams, const ForwardContext& context, MixerState* state) const {
  auto* cache = static_cast<PerLayerEmbeddingState*>(state);
  const auto& pack = context.pack;
  const auto& ranks = context.mesh.sequence();
  const auto pieces = pieces_of(pack, context.mesh.cp().size(), context.mesh.tp().size());
  const auto& own = pieces[ranks.rank()];
  const auto e = ple_embedding_.forward(context.tokens, pack, own, cache ? &cache->history : nullptr, streams.options(),
                                        context.mesh.ep());                                        // [T, Pe]
  const auto key = norm_key_.forward(key_proj_.forward(e)), query = norm_query_.forward(streams);  // [T, n, D]
  const auto score = (key * query).sum(2, /*keepdim=*/true) / std::sqrt(static_cast<double>(sizes_.hidden_size));
  const auto gate = (score.abs().clamp_min(1e-6).sqrt() * score.sign()).sigmoid();  // [T, n, 1]
  const auto gated = (gate * value_proj_.forward(e).unsqueeze(1)).flatten(1);       // [T, n D]
  const auto normed = norm_conv_.forward(gated).flatten(1);
  const auto dilation = sizes_.hash.ngram_size, reach = (sizes_.conv_kernel_dim - 1) * dilation;
  std::optional<Tensor> before;  // [N, n D, reach]
  if (cache != nullptr) {
    before = read_slots(cache->conv, pack.slot_index);
  } else if (const Lookback lookback(pieces, reach, ranks); lookback.is_needed()) {
    const auto rows = lookback.rows(normed);  // [count, n D]
    const auto sequences = static_cast<std::int64_t>(own.lengths.size());
    const auto first = at::constant_pad_nd(rows.t(), {reach - rows.size(0), 0}).unsqueeze(0);
    const auto others = at::zeros({std::max<std::int64_t>(sequences - 1, 0), rows.size(1), reach}, rows.options());
    before = at::cat({first, others}).narrow(0, 0, sequences);
  }
  const auto conv = dilated_causal_conv(normed, conv_weight_.value, own.lengths, before, dilation);
  if (cache != nullptr) write_slots(cache->conv, pack.slot_index, conv.history);
  return gated + conv.out;
}

std::unique_ptr<MixerState> PerLayerEmbedding::new_state(std::int64_t slots, std::int64_t,
                                                         const at::TensorOptions& activations) const {
  auto state = std::make_unique<PerLayerEmbeddingState>();
  const auto reach = (sizes_.conv_kernel_dim - 1) * sizes_.hash.ngram_size;
  state->eos_token_id = sizes_.hash.eos_token_id;
  state->history =
      at::full({slots, ple_embedding_.hash().context()}, sizes_.hash.eos_token_id, at::TensorOptions().dtype(kLong));
  state->conv = at::zeros({slots, sizes_.streams * sizes_.hidden_size, reach}, activations);
  return state;
}

void PerLayerEmbedding::count_operations(std::span<const std::int64_t> lengths, Operations& operations) const {
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  operations["n-gram embedding"] +=
      key_proj_.operations(tokens) + value_proj_.operations(tokens) +
      2 * tokens * static_cast<double>(sizes_.streams * sizes_.hidden_size * sizes_.conv_kernel_dim);
}

}  // namespace sluice
