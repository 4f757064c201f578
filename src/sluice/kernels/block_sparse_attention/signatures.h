// SPDX-License-Identifier: Apache-2.0
// The operator's registered forms, as the dispatcher is asked for them.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "sluice/core/tensor.h"

namespace sluice::block_sparse {

using Optional = const std::optional<Tensor>&;
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                                           const Tensor&, const Tensor&, Optional, double);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                                                    const Tensor&, const Tensor&, Optional, double);

}  // namespace sluice::block_sparse
