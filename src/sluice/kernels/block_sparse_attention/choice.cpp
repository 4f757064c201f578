// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/block_sparse_attention/choice.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/packing.h"

namespace sluice {

std::vector<KeyedSequence> keyed_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                           const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k) {
  const auto q_bounds = checked_bounds("block_sparse_attention, cu_seqlens_q", cu_seqlens_q, q.size(0));
  const auto k_bounds = seqused_k ? sequence_bounds(cu_seqlens_k)
                                  : checked_bounds("block_sparse_attention, cu_seqlens_k", cu_seqlens_k, k.size(0));
  const auto used = seqused_k ? seqused_k->contiguous() : Tensor();
  std::vector<KeyedSequence> sequences;
  for (std::size_t n = 0; n + 1 < q_bounds.size(); ++n) {
    const auto begin = k_bounds[n];
    const std::int64_t count = seqused_k ? used.const_data_ptr<std::int32_t>()[n] : k_bounds[n + 1] - begin;
    SLUICE_CHECK(begin >= 0 && count >= 0 && begin + count <= k.size(0),
                 "block_sparse_attention: the {} keys of sequence {} begin at row {} of k, which has {} rows.\n"
                 "  They must lie inside it: cu_seqlens_k[{}] + seqused_k[{}] <= Tk.",
                 count, n, begin, k.size(0), n, n);
    sequences.push_back(
        {.q_begin = q_bounds[n], .q_count = q_bounds[n + 1] - q_bounds[n], .k_begin = begin, .k_count = count});
  }
  return sequences;
}

void check_apart(std::vector<KeyedSequence> sequences) {
  std::ranges::sort(sequences, {}, &KeyedSequence::k_begin);
  std::int64_t end = 0;
  for (const auto& s : sequences) {
    if (s.k_count == 0) continue;
    SLUICE_CHECK(s.k_begin >= end,
                 "block_sparse_attention: two sequences share the keys from row {} on; gradients are computed only for "
                 "sequences whose keys do not overlap",
                 s.k_begin);
    end = s.k_begin + s.k_count;
  }
}

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
