// SPDX-License-Identifier: Apache-2.0
// Softmax attention in ATen over tiles of queries, for any mask: the path on GPUs where no fused kernel serves. All
// scores of a tile are held at once, so its rows are as many as bounded memory allows.
#pragma once

#include <functional>
#include <tuple>
#include <vector>

#include "sluice/kernels/common/attention_inputs.h"

namespace sluice {

// Queries [first, first + rows) of a sequence and its keys [0, keys), which are all that one of them sees.
struct AttentionTile {
  KeyedSequence sequence;
  std::int64_t first, rows, keys;
};

// [rows, keys] bool: true where a query does not attend to a key.
using HiddenKeys = std::function<Tensor(const AttentionTile&)>;

// Shapes as in attention/attention.h. out [Tq, Hq, dv], and lse [Tq, Hq], the log of the softmax's denominator,
// -infinity where a query attends to nothing. Scores and sums are wide (rows.h); products of bfloat16 are of bfloat16.
std::tuple<Tensor, Tensor> tiled_attention(const std::vector<KeyedSequence>& sequences, const Tensor& q,
                                           const Tensor& k, const Tensor& v, const HiddenKeys& hidden, double scale);

// The gradients of q, k and v. The sequences' keys must not overlap.
std::tuple<Tensor, Tensor, Tensor> tiled_attention_backward(const std::vector<KeyedSequence>& sequences,
                                                            const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor& out, const Tensor& lse,
                                                            const HiddenKeys& hidden, double scale);

}  // namespace sluice
