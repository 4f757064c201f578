// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/token_split.h"

#include "sluice/layers/split.h"

namespace sluice {

TokenSplit split_tokens(std::int64_t tokens, const Mesh& mesh) {
  const auto cp = mesh.cp().size(), tp = mesh.tp().size();
  const auto begin = [&](std::int64_t piece) { return piece_begin(tokens, cp * tp, piece); };
  const auto rows = [&](std::int64_t first, std::int64_t count, std::int64_t pieces) {
    std::vector<std::int64_t> list;
    for (auto i = first; i < first + count; ++i) list.push_back(begin((i + 1) * pieces) - begin(i * pieces));
    return list;
  };
  const auto first_piece = mesh.cp().rank() * tp, own = first_piece + mesh.tp().rank();
  return {.first = begin(own),
          .count = begin(own + 1) - begin(own),
          .context_first = begin(first_piece),
          .context_count = begin(first_piece + tp) - begin(first_piece),
          .rows = rows(first_piece, tp, 1),
          .context_rows = rows(0, cp, tp),
          .piece_rows = rows(0, cp * tp, 1)};
}

}  // namespace sluice
