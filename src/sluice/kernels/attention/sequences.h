// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/kernels/common/attention_inputs.h"

namespace sluice {

// keyed_sequences(), checked against the longest lengths too.
std::vector<KeyedSequence> checked_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                             const Tensor& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
                                             std::int64_t max_seqlen_q, std::int64_t max_seqlen_k);

}  // namespace sluice
