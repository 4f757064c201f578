// SPDX-License-Identifier: Apache-2.0
// Matrix products on the CPU with results wider than the operands. ATen rounds the product of bfloat16 matrices to
// bfloat16; a softmax of such scores is off by percents.
#pragma once

#include "sluice/core/tensor.h"

namespace sluice {

// c = a b, or c += a b when `accumulate`. a [m, k] and b [k, n] of one dtype, each contiguous along one dim (a
// transposed view is as good); c [m, n] likewise, float32 for float32 and bfloat16 operands, float64 for float64.
// bfloat16 runs by block products on processors with a matrix unit (AMX) or AVX512_BF16, with exact products and
// float32 sums, else on operands widened to float32, the larger one piece by piece. A result depends on its own row and
// column alone: on the matrix unit to the last bit, and there b^T a^T has the bits of a b; elsewhere the order of its
// sum may follow the sizes. b is what is packed first, so let it be the smaller one. Inside at::parallel_for it runs on
// the calling thread, elsewhere on all threads. Takes no part in autograd.
void matmul_into(const Tensor& c, const Tensor& a, const Tensor& b, bool accumulate);

// x weight^T of x [.., k] and weight [n, k], differentiable. As at::linear; but up to four rows on a CPU, outside of
// autograd, go by loops that read the weight at the memory's speed, where a library may take two or three times as
// long.
Tensor times_weight(const Tensor& x, const Tensor& weight);

}  // namespace sluice
