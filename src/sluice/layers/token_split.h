// SPDX-License-Identifier: Apache-2.0
// Which tokens of a pack a rank works on. Of cp x tp contiguous pieces of the pack, tensor rank t of context rank c
// holds number c tp + t of the residual (sequence parallelism, Korthikanti et al. 2022, arXiv 2205.05198): what looks
// at each token alone works on those. What needs more takes the tokens of its tensor ranks together, and gives each its
// part of what the ranks' heads or columns sum up to.
//
// A cut between context ranks that falls into a sequence lies a multiple of 64 tokens from the sequence's beginning,
// the nearest to an even cut. The recurrence works on chunks of 64 tokens, or a divisor: so they are the same as
// without the cut, and so are the bits that come of them. Packs of less than 256 tokens a context rank are cut evenly.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

struct TokenSplit {
  std::int64_t first = 0, count = 0;                  // own tokens of the pack
  std::int64_t context_first = 0, context_count = 0;  // the tensor ranks' together: the context rank's piece
  std::vector<std::int64_t> rows;                     // of each tensor rank, of those
  std::vector<std::int64_t> context_rows;             // of each context rank
  std::vector<std::int64_t> piece_rows;               // of each of the cp x tp pieces
};
// Of sequences of these lengths, one behind the other.
TokenSplit split_tokens(std::span<const std::int64_t> lengths, const Mesh& mesh);

// Where each of the cp x tp pieces begins; then where the last ends.
std::vector<std::int64_t> piece_bounds(std::span<const std::int64_t> lengths, std::int64_t context_ranks,
                                       std::int64_t tensor_ranks);

}  // namespace sluice
