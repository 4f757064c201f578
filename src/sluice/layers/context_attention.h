// SPDX-License-Identifier: Apache-2.0
// Softmax attention over a pack whose pieces lie on the ranks of a group. Keys and values go to every rank, for there
// are few heads of them; each rank attends for some of the queries.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sluice/layers/pack_pieces.h"

namespace sluice {

// Each rank's piece of a pack is two chunks: of 2 n chunks, rank c of n holds 2 c and 2 c + 1. Late queries see more
// keys than early ones, so for attention it takes chunks c and 2 n - 1 - c instead: all ranks then have as much to do
// (zigzag order; Megatron-LM's and ring attention's balance). One exchange there, one back. Lengths need not divide.
class Zigzag {
 public:
  // `bounds` [n + 1]: where the pieces begin, and where the last ends.
  Zigzag(std::vector<std::int64_t> bounds, const Group& group);

  // x [tokens of the rank's piece, ..] to [tokens of its two chunks, ..], and back. Differentiable.
  Tensor to_chunks(const Tensor& x) const;
  Tensor to_piece(const Tensor& x) const;

  // First token and count of the two chunks.
  struct Chunk {
    std::int64_t first, count;
  };
  Chunk early() const { return chunk(group_.rank()); }
  Chunk late() const { return chunk(2 * group_.size() - 1 - group_.rank()); }

 private:
  Chunk chunk(std::int64_t i) const;
  std::int64_t holder(std::int64_t chunk) const;

  std::vector<std::int64_t> bounds_;
  const Group& group_;
  std::vector<std::int64_t> sent_, received_;  // rows to and from each rank on the way to the chunks
  bool turned_;                                // the piece's second chunk goes to the lower rank
};

// Rows of keys and values, and which of them are whose, as kernels/attention takes them.
struct SeenKeys {
  Tensor k, v;  // [rows, Hkv, d]
  Tensor cu_seqlens;
  std::optional<Tensor> seqused;
  std::int64_t longest;
};

// The blocks of keys that queries attend to (kernels/block_sparse_attention); none: they attend to all that they see.
struct KeyBlocks {
  std::optional<Tensor> chosen;  // [T, K]
  std::int64_t size = 0;
};

// Of sequences that lie here: q [T, Hq, d] to [T, Hq, d].
Tensor attend(const Tensor& q, const Tensor& cu_seqlens_q, std::int64_t longest_q, const SeenKeys& keys,
              const KeyBlocks& blocks, double scale);

// q [T, Hq, d], k and v [T, Hkv, d] of the context rank's piece to [T, Hq, d]. With blocks, where each query attends to
// about as many keys as any other, queries stay on their ranks. Differentiable.
Tensor context_attention(const Tensor& q, const Tensor& k, const Tensor& v, const KeyBlocks& blocks,
                         const ForwardContext& context, double scale);

}  // namespace sluice
