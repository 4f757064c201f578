// SPDX-License-Identifier: Apache-2.0
// Sequence boundaries of a pack, as every operator takes them: cu_seqlens [N + 1] int32, first 0, last the token count.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

// Shape and type of cu_seqlens, on any device; no values are read.
void check_cu_seqlens(std::string_view op, const Tensor& cu_seqlens);

// The boundaries of a pack that lies in CPU memory.
std::vector<std::int64_t> sequence_bounds(const Tensor& cu_seqlens);

// The same, checked against the token count: first 0, never falling, last `tokens`.
std::vector<std::int64_t> checked_bounds(std::string_view op, const Tensor& cu_seqlens, std::int64_t tokens);

}  // namespace sluice
