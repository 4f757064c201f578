// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/block_sparse_attention/choice.h"

#include "sluice/core/error.h"

namespace sluice {

Choice checked_choice(const std::vector<KeyedSequence>& sequences, const Tensor& blocks, std::int64_t block_size) {
  Choice choice{.blocks = blocks.contiguous(), .count = {}, .block_size = block_size};
  const auto tokens = blocks.size(0), most = blocks.size(1);
  choice.count.resize(tokens);
  const auto* chosen = choice.blocks.const_data_ptr<std::int32_t>();
  for (const auto& s : sequences) {
    for (std::int64_t i = 0; i < s.q_count; ++i) {
      const auto* own = chosen + (s.q_begin + i) * most;
      const auto complete = s.visible(i) / block_size;
      std::int64_t count = 0;
      for (std::int64_t last = -1; count < most && own[count] != -1; last = own[count++]) {
        SLUICE_CHECK(own[count] > last && own[count] < complete,
                     "block_sparse_attention: blocks[{}][{}] is {}; the blocks of a query rise, and this one sees {} "
                     "complete blocks. After the last one stands -1.",
                     s.q_begin + i, count, own[count], complete);
      }
      choice.count[s.q_begin + i] = static_cast<std::int32_t>(count);
    }
  }
  return choice;
}

}  // namespace sluice
