// SPDX-License-Identifier: Apache-2.0
// The keys that each query attends to, as runs of neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/kernels/common/attention_inputs.h"

namespace sluice {

struct Choice {
  Tensor blocks;                    // [Tq, K] int32, dense
  std::vector<std::int32_t> count;  // chosen blocks of each query
  std::int64_t block_size;

  // Calls body(begin, end) for each run of keys in [first, last), counted from the sequence's first key, that query i
  // of `s` attends to; runs rise.
  template <typename Body>
  void for_each_run(const KeyedSequence& s, std::int64_t i, std::int64_t first, std::int64_t last,
                    const Body& body) const {
    const auto token = s.q_begin + i;
    const auto* begin = blocks.const_data_ptr<std::int32_t>() + token * blocks.size(1);
    const auto* end = begin + count[token];
    const auto run = [&](std::int64_t from, std::int64_t to) {
      from = std::max(from, first), to = std::min(to, last);
      if (from < to) body(from, to);
    };
    for (const auto* block = std::lower_bound(begin, end, first / block_size); block != end; ++block) {
      if (*block * block_size >= last) break;
      run(*block * block_size, (*block + 1) * block_size);
    }
    const auto visible = s.visible(i);
    run(visible / block_size * block_size, visible);
  }
};

// Checks that every query's blocks rise, are complete and are seen by it.
Choice checked_choice(const std::vector<KeyedSequence>& sequences, const Tensor& blocks, std::int64_t block_size);

}  // namespace sluice
