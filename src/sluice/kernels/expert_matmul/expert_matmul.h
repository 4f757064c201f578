// SPDX-License-Identifier: Apache-2.0
// Matrix products of routed experts: each line is one token's visit to one expert, and lines lie sorted by expert. With
// e(i) the expert of line i, offsets[e] <= i < offsets[e + 1]:
//   out[out_rows[i]] += W_e(i) x[x_rows[i]]
// A token that visits several experts is read from the one row that it has, and what its experts give is summed where
// it belongs; no copy of x is kept for each visit. An expert without lines is touched neither forward nor backward, and
// its weight's gradient is 0. Grouped products of experts: Gale et al. 2022, "MegaBlocks".
//
// E experts, M lines.
#pragma once

#include <optional>

#include "sluice/core/tensor.h"

namespace sluice {

// Differentiable in x and weight; one that needs no gradient costs none. out [out_size, out] in the dtype of x; rows
// that no line names are 0. The gradient of x is the same operator with W^T and the two row lists exchanged.
// float32, bfloat16 or float64; sums, also those over lines, are float32, or float64 when x is, and are rounded once.
// Error against the float64 definition, relative per tensor: float32 2e-6, bfloat16 3e-3.
Tensor expert_matmul(const Tensor& x,                        // [X, in]
                     const Tensor& weight,                   // [E, out, in], dtype of x
                     const Tensor& offsets,                  // [E + 1] int32: 0, then the end of each expert's lines
                     const std::optional<Tensor>& x_rows,    // [M] int64; none: line i reads row i
                     const std::optional<Tensor>& out_rows,  // [M] int64, may repeat; none: line i writes row i
                     std::int64_t out_size);                 // rows of the result; M without out_rows

// The equation above in ATen, for any float type: what the words mean.
Tensor expert_matmul_definition(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                                const std::optional<Tensor>& x_rows, const std::optional<Tensor>& out_rows,
                                std::int64_t out_size);

}  // namespace sluice
