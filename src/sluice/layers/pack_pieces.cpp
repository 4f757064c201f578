// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/pack_pieces.h"

#include <algorithm>
#include <numeric>

#include "sluice/layers/split.h"
#include "sluice/parallel/collectives.h"

namespace sluice {

PackPiece piece_of(const Pack& pack, std::int64_t first, std::int64_t count) {
  PackPiece piece{.first = first, .count = count};
  const auto end = first + count;
  std::int64_t begin = 0;
  for (std::size_t n = 0; n < pack.lengths.size(); begin += pack.lengths[n++]) {
    const auto sequence_end = begin + pack.lengths[n];
    const auto own = std::min(sequence_end, end) - std::max(begin, first);
    if (own <= 0) continue;
    if (piece.lengths.empty()) {
      piece.first_sequence = static_cast<std::int64_t>(n);
      piece.begun = std::max<std::int64_t>(first - begin, 0);
    }
    piece.lengths.push_back(own);
    piece.goes_on = sequence_end > end;
  }
  return piece;
}

std::vector<PackPiece> pieces_of(const Pack& pack, std::int64_t context_ranks, std::int64_t tensor_ranks) {
  if (context_ranks * tensor_ranks == 1) return {{.count = pack.positions.numel(), .lengths = pack.lengths}};
  const auto bounds = piece_bounds(pack.lengths, context_ranks, tensor_ranks);
  std::vector<PackPiece> pieces;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    pieces.push_back(piece_of(pack, bounds[i], bounds[i + 1] - bounds[i]));
  }
  return pieces;
}

Tensor cu_seqlens_of(const Pack& pack, const std::vector<std::int64_t>& lengths) {
  if (lengths == pack.lengths) return pack.cu_seqlens;
  return cu_seqlens_of(lengths, pack.cu_seqlens.device());
}

Lookback::Lookback(const std::vector<PackPiece>& pieces, std::int64_t reach, const Group& group) : group_(group) {
  for (const auto& piece : pieces) lent_.push_back(piece.goes_on ? std::min(piece.count, reach) : 0);
  // What lies before the piece in its sequence ends what the ranks before it lend.
  count_ = std::min(reach, pieces[group.rank()].begun);
  begin_ = std::accumulate(lent_.begin(), lent_.begin() + group.rank(), std::int64_t{0}) - count_;
}

bool Lookback::is_needed() const {
  return std::ranges::any_of(lent_, [](auto rows) { return rows > 0; });
}

Tensor Lookback::rows(const Tensor& x) const {
  const auto own = lent_[group_.rank()];
  return all_gather_rows(x.narrow(0, x.size(0) - own, own), lent_, group_).narrow(0, begin_, count_);
}

void Lookback::add_gradient(const Tensor& grad_rows, Tensor& grad_x) const {
  auto sizes = grad_x.sizes().vec();
  sizes[0] = std::accumulate(lent_.begin(), lent_.end(), std::int64_t{0});
  auto all = at::zeros(sizes, grad_x.options());
  if (count_ > 0) all.narrow(0, begin_, count_).copy_(grad_rows);
  const auto own = lent_[group_.rank()];
  grad_x.narrow(0, grad_x.size(0) - own, own).add_(reduce_scatter_rows(all, lent_, group_));
}

}  // namespace sluice
