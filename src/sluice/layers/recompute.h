// SPDX-License-Identifier: Apache-2.0
// Activation recompute (Chen et al. 2016): forget a part's inner activations after the forward pass, and compute them
// again in the backward pass.
#pragma once

#include <functional>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

using Recomputed = std::function<std::vector<Tensor>(const Tensor&)>;

// function(x), keeping x alone for the backward pass. `parameters` are the tensors besides x that get gradients through
// it. The function runs twice and must give the same bits both times.
std::vector<Tensor> recompute(const Recomputed& function, const Tensor& x, const std::vector<Tensor>& parameters);

}  // namespace sluice
