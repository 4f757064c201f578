// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/attention/sequences.h"

#include "sluice/core/error.h"

namespace sluice {

std::vector<KeyedSequence> checked_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                             const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
                                             std::int64_t max_seqlen_q, std::int64_t max_seqlen_k) {
  auto sequences = keyed_sequences("attention", q, k, cu_seqlens_q, cu_seqlens_k, seqused_k);
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const auto& s = sequences[n];
    SLUICE_CHECK(
        s.q_count <= max_seqlen_q && s.k_count <= max_seqlen_k,
        "attention: sequence {} has {} queries and {} keys; max_seqlen_q = {} and max_seqlen_k = {} must be at "
        "least the longest",
        n, s.q_count, s.k_count, max_seqlen_q, max_seqlen_k);
  }
  return sequences;
}

}  // namespace sluice
