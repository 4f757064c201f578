// SPDX-License-Identifier: Apache-2.0
// A pack cut into contiguous pieces, one for each rank of a group, and what its sequences do at their ends. A boundary
// between sequences may fall anywhere; a sequence may be shorter than a piece, or run through several.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sluice/layers/pack.h"

namespace sluice {

struct PackPiece {
  std::int64_t first = 0, count = 0;       // its tokens in the pack
  std::int64_t first_sequence = 0;         // of the pack's, by number
  std::int64_t begun = 0;                  // tokens of its first sequence that lie before it
  bool goes_on = false;                    // its last sequence has tokens after it
  std::vector<std::int64_t> lengths = {};  // tokens in it of each sequence that has any
  bool is_inside() const { return lengths.size() == 1 && begun > 0 && goes_on; }  // of one sequence, and neither end
};

PackPiece piece_of(const Pack& pack, std::int64_t first, std::int64_t count);

// As split_tokens() cuts a pack: by context rank, or by context and tensor rank.
std::vector<PackPiece> pieces_of(const Pack& pack, std::int64_t context_ranks, std::int64_t tensor_ranks = 1);

// [n + 1] int32 on the pack's device: 0, then the end of each of these lengths. Of all of the pack's, the pack's own.
Tensor cu_seqlens_of(const Pack& pack, const std::vector<std::int64_t>& lengths);

// The rows that stand before a piece's first sequence: how a layer looks back beyond the piece. They come from the ends
// of earlier pieces, of several where these are short.
class Lookback {
 public:
  // `reach`: how many rows the layer looks back at most.
  Lookback(const std::vector<PackPiece>& pieces, std::int64_t reach, const Group& group);

  std::int64_t count() const { return count_; }  // min(reach, begun) of this rank's piece

  // Whether any rank looks back. Where one does, all call the following.
  bool is_needed() const;

  // From x [tokens of the piece, ..] of every rank to the rows before this one's, [count, ..], in the order of tokens.
  // Differentiable.
  Tensor rows(const Tensor& x) const;

  // Adds to the gradient of each rank's x, in place, what the ranks' gradients of rows() [count, ..] bring.
  void add_gradient(const Tensor& grad_rows, Tensor& grad_x) const;

 private:
  const Group& group_;
  std::vector<std::int64_t> lent_;  // rows at the end of each piece that later ones look at
  std::int64_t begin_, count_;      // of this rank's rows among all that are lent
};

}  // namespace sluice
