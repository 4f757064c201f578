// SPDX-License-Identifier: Apache-2.0
// The products at the two ends of a layer whose heads or columns are split over tensor ranks (Shoeybi et al. 2019,
// arXiv 1909.08053), while its tokens are outside (Korthikanti et al. 2022, arXiv 2205.05198): tokens are gathered
// before the first, and the sums of what the second gives are scattered. Of a long pack these exchanges go on beside
// the products, forward and backward: a rank's own rows are multiplied while the others' come, and the others' are
// computed first, so that they go while own ones are computed. In one process both are plain products.
#pragma once

#include <vector>

#include "sluice/layers/linear.h"

namespace sluice {

struct GatheredProducts {
  Tensor x;               // [T, D]: the tokens of all tensor ranks
  std::vector<Tensor> y;  // [T, out] each
};

// y = x W^T of each weight [out, D], for the tokens x of all tensor ranks, of which `own` are this rank's.
GatheredProducts gathered_products(const Tensor& own, const std::vector<Tensor>& weights,
                                   const ForwardContext& context);

// The same of projections, with what their adapters add.
GatheredProducts column_parallel(const Tensor& own, const std::vector<const Linear*>& projections,
                                 const ForwardContext& context);

// The sum over the tensor ranks of x W^T, each with its x [T, in] and its columns of W: [own tokens, D]. Where the
// projection has an adapter, the exchange comes after the products.
Tensor row_parallel(const Tensor& x, const Linear& projection, const ForwardContext& context);

}  // namespace sluice
