// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/attention/sequences.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/packing.h"

namespace sluice {

std::vector<Sequence> checked_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                        const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
                                        std::int64_t max_seqlen_q, std::int64_t max_seqlen_k) {
  const auto q_bounds = checked_bounds("attention, cu_seqlens_q", cu_seqlens_q, q.size(0));
  const auto k_bounds =
      seqused_k ? sequence_bounds(cu_seqlens_k) : checked_bounds("attention, cu_seqlens_k", cu_seqlens_k, k.size(0));
  const auto used = seqused_k ? seqused_k->contiguous() : Tensor();
  std::vector<Sequence> sequences;
  for (std::size_t n = 0; n + 1 < q_bounds.size(); ++n) {
    const auto begin = k_bounds[n];
    const std::int64_t count = seqused_k ? used.const_data_ptr<std::int32_t>()[n] : k_bounds[n + 1] - begin;
    SLUICE_CHECK(begin >= 0 && count >= 0 && begin + count <= k.size(0),
                 "attention: the {} keys of sequence {} begin at row {} of k, which has {} rows.\n"
                 "  They must lie inside it: cu_seqlens_k[{}] + seqused_k[{}] <= Tk.",
                 count, n, begin, k.size(0), n, n);
    const auto queries = q_bounds[n + 1] - q_bounds[n];
    SLUICE_CHECK(
        queries <= max_seqlen_q && count <= max_seqlen_k,
        "attention: sequence {} has {} queries and {} keys; max_seqlen_q = {} and max_seqlen_k = {} must be at "
        "least the longest",
        n, queries, count, max_seqlen_q, max_seqlen_k);
    sequences.push_back({.q_begin = q_bounds[n], .q_count = queries, .k_begin = begin, .k_count = count});
  }
  return sequences;
}

}  // namespace sluice
