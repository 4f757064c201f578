// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/keyed_sequences.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/packing.h"

namespace sluice {

std::vector<KeyedSequence> keyed_sequences(std::string_view op, const Tensor& q, const Tensor& k,
                                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                           const std::optional<Tensor>& seqused_k) {
  const auto q_bounds = checked_bounds(fmt::format("{}, cu_seqlens_q", op), cu_seqlens_q, q.size(0));
  const auto k_bounds = seqused_k ? sequence_bounds(cu_seqlens_k)
                                  : checked_bounds(fmt::format("{}, cu_seqlens_k", op), cu_seqlens_k, k.size(0));
  const auto used = seqused_k ? seqused_k->contiguous() : Tensor();
  std::vector<KeyedSequence> sequences;
  for (std::size_t n = 0; n + 1 < q_bounds.size(); ++n) {
    const auto begin = k_bounds[n];
    const std::int64_t count = seqused_k ? used.const_data_ptr<std::int32_t>()[n] : k_bounds[n + 1] - begin;
    SLUICE_CHECK(begin >= 0 && count >= 0 && begin + count <= k.size(0),
                 "{}: the {} keys of sequence {} begin at row {} of k, which has {} rows.\n"
                 "  They must lie inside it: cu_seqlens_k[{}] + seqused_k[{}] <= Tk.",
                 op, count, n, begin, k.size(0), n, n);
    sequences.push_back(
        {.q_begin = q_bounds[n], .q_count = q_bounds[n + 1] - q_bounds[n], .k_begin = begin, .k_count = count});
  }
  return sequences;
}

void check_apart(std::string_view op, std::vector<KeyedSequence> sequences) {
  std::ranges::sort(sequences, {}, &KeyedSequence::k_begin);
  std::int64_t end = 0;
  for (const auto& s : sequences) {
    if (s.k_count == 0) continue;
    SLUICE_CHECK(
        s.k_begin >= end,
        "{}: two sequences share the keys from row {} on; gradients are computed only for sequences whose keys "
        "do not overlap",
        op, s.k_begin);
    end = s.k_begin + s.k_count;
  }
}

}  // namespace sluice
