// SPDX-License-Identifier: Apache-2.0
// What the operators of attention take: queries, keys and values, and where those of each sequence lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

struct KeyedSequence {
  std::int64_t q_begin, q_count, k_begin, k_count;
  // Keys [0, visible(i)) are seen by query i; none may be.
  std::int64_t visible(std::int64_t query) const { return std::max<std::int64_t>(0, k_count - q_count + query + 1); }
};

// Shapes and types of what every operator of attention takes, on any device; no values are read. `op` names the
// operator in errors.
void check_attention_inputs(std::string_view op, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                            const std::optional<Tensor>& seqused_k);

// The sequences of a pack in CPU memory, checked against the numbers of rows of q and k.
std::vector<KeyedSequence> keyed_sequences(std::string_view op, const Tensor& q, const Tensor& k,
                                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                           const std::optional<Tensor>& seqused_k);

// An error if two sequences share keys: their gradients would meet in the same rows.
void check_apart(std::string_view op, std::vector<KeyedSequence> sequences);

}  // namespace sluice
