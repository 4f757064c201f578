// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/token_split.h"

#include <algorithm>
#include <numeric>

#include "sluice/layers/split.h"

namespace sluice {
namespace {

constexpr std::int64_t kChunk = 64, kFewestChunks = 4;  // of a context rank's piece that is cut between chunks

std::int64_t nearest_chunk(std::span<const std::int64_t> lengths, std::int64_t cut) {
  std::int64_t begin = 0;
  for (const auto length : lengths) {
    if (cut < begin + length) return std::min(begin + (cut - begin + kChunk / 2) / kChunk * kChunk, begin + length);
    begin += length;
  }
  return begin;
}

}  // namespace

std::vector<std::int64_t> piece_bounds(std::span<const std::int64_t> lengths, std::int64_t context_ranks,
                                       std::int64_t tensor_ranks) {
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const bool in_chunks = tokens >= context_ranks * kFewestChunks * kChunk;
  const auto context_bound = [&](std::int64_t rank) {
    const auto even = piece_begin(tokens, context_ranks, rank);
    return in_chunks && rank > 0 ? nearest_chunk(lengths, even) : even;
  };
  std::vector<std::int64_t> bounds;
  for (std::int64_t c = 0; c < context_ranks; ++c) {
    const auto first = context_bound(c), count = context_bound(c + 1) - first;
    for (std::int64_t t = 0; t < tensor_ranks; ++t) bounds.push_back(first + piece_begin(count, tensor_ranks, t));
  }
  bounds.push_back(tokens);
  return bounds;
}

TokenSplit split_tokens(std::span<const std::int64_t> lengths, const Mesh& mesh) {
  const auto cp = mesh.cp().size(), tp = mesh.tp().size();
  const auto bounds = piece_bounds(lengths, cp, tp);
  const auto rows = [&](std::int64_t first, std::int64_t count, std::int64_t pieces) {
    std::vector<std::int64_t> list;
    for (auto i = first; i < first + count; ++i) list.push_back(bounds[(i + 1) * pieces] - bounds[i * pieces]);
    return list;
  };
  const auto first_piece = mesh.cp().rank() * tp, own = first_piece + mesh.tp().rank();
  return {.first = bounds[own],
          .count = bounds[own + 1] - bounds[own],
          .context_first = bounds[first_piece],
          .context_count = bounds[first_piece + tp] - bounds[first_piece],
          .rows = rows(first_piece, tp, 1),
          .context_rows = rows(0, cp, tp),
          .piece_rows = rows(0, cp * tp, 1)};
}

}  // namespace sluice
