// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/context_attention.h"

#include <algorithm>

#include "sluice/kernels/attention/attention.h"
#include "sluice/kernels/block_sparse_attention/block_sparse_attention.h"
#include "sluice/layers/split.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

// All keys and values of the pack.
struct KeysAndValues {
  Tensor k, v;  // [T, Hkv, d]
};

// For `queries` of the pack, which see the keys from the beginning of their first sequence to their last token.
Tensor attend_in_pack(const Tensor& q, const KeysAndValues& all, const PackPiece& queries, const KeyBlocks& blocks,
                      const Pack& pack, double scale) {
  if (queries.count == 0) {
    // No rows, but as much a function of q, k and v as any other: gradients are exchanged by all ranks or by none.
    const auto none = (all.k + all.v).narrow(0, 0, 0);
    return q + none.repeat_interleave(q.size(1) / none.size(1), 1);
  }
  const auto begin = queries.first - queries.begun, rows = queries.begun + queries.count;
  auto key_lengths = queries.lengths;
  key_lengths[0] += queries.begun;
  return attend(q, cu_seqlens_of(pack, queries.lengths), std::ranges::max(queries.lengths),
                {.k = all.k.narrow(0, begin, rows),
                 .v = all.v.narrow(0, begin, rows),
                 .cu_seqlens = cu_seqlens_of(pack, key_lengths),
                 .seqused = {},
                 .longest = std::ranges::max(key_lengths)},
                blocks, scale);
}

}  // namespace

Zigzag::Zigzag(std::vector<std::int64_t> bounds, const Group& group)
    : bounds_(std::move(bounds)), group_(group), sent_(group.size()), received_(group.size()) {
  const auto own = 2 * group.rank();
  for (const auto i : {own, own + 1}) sent_[holder(i)] += chunk(i).count;
  for (const auto i : {group.rank(), 2 * group.size() - 1 - group.rank()}) received_[i / 2] += chunk(i).count;
  turned_ = holder(own) > holder(own + 1);
}

Zigzag::Chunk Zigzag::chunk(std::int64_t i) const {
  const auto first = bounds_[i / 2], count = bounds_[i / 2 + 1] - first, half = i % 2;
  return {first + piece_begin(count, 2, half), piece_begin(count, 2, half + 1) - piece_begin(count, 2, half)};
}

std::int64_t Zigzag::holder(std::int64_t chunk) const { return std::min(chunk, 2 * group_.size() - 1 - chunk); }

Tensor Zigzag::to_chunks(const Tensor& x) const {
  const auto first = chunk(2 * group_.rank()).count;
  const auto by_rank = turned_ ? at::cat({x.narrow(0, first, x.size(0) - first), x.narrow(0, 0, first)}) : x;
  return all_to_all_rows(by_rank, sent_, received_, group_);
}

Tensor Zigzag::to_piece(const Tensor& x) const {
  auto by_rank = all_to_all_rows(x, received_, sent_, group_);
  if (!turned_) return by_rank;
  const auto second = chunk(2 * group_.rank() + 1).count;
  return at::cat({by_rank.narrow(0, second, by_rank.size(0) - second), by_rank.narrow(0, 0, second)});
}

Tensor attend(const Tensor& q, const Tensor& cu_seqlens_q, std::int64_t longest_q, const SeenKeys& keys,
              const KeyBlocks& blocks, double scale) {
  if (blocks.chosen) {
    return block_sparse_attention(q, keys.k, keys.v, *blocks.chosen, blocks.size, cu_seqlens_q, keys.cu_seqlens,
                                  keys.seqused, scale);
  }
  return attention(q, keys.k, keys.v, cu_seqlens_q, keys.cu_seqlens, keys.seqused, longest_q, keys.longest, scale);
}

Tensor context_attention(const Tensor& q, const Tensor& k, const Tensor& v, const KeyBlocks& blocks,
                         const ForwardContext& context, double scale) {
  const auto& pack = context.pack;
  const auto& ranks = context.mesh.cp();
  const auto pieces = pieces_of(pack, ranks.size());
  const auto& own = pieces[ranks.rank()];
  if (ranks.size() == 1) return attend_in_pack(q, {k, v}, own, blocks, pack, scale);
  const auto both = all_gather_rows(at::stack({k, v}, 1), context.split.context_rows, ranks);  // [T, 2, Hkv, d]
  const KeysAndValues all{both.select(1, 0), both.select(1, 1)};
  if (blocks.chosen) return attend_in_pack(q, all, own, blocks, pack, scale);

  const Zigzag zigzag(piece_bounds(pack.lengths, ranks.size(), 1), ranks);
  const auto queries = zigzag.to_chunks(q);
  std::vector<Tensor> outs;
  std::int64_t row = 0;
  for (const auto& [first, count] : {zigzag.early(), zigzag.late()}) {
    outs.push_back(
        attend_in_pack(queries.narrow(0, row, count), all, piece_of(pack, first, count), blocks, pack, scale));
    row += count;
  }
  return zigzag.to_piece(at::cat(outs));
}

}  // namespace sluice
