// SPDX-License-Identifier: Apache-2.0
// The sampler of sampler.h for rows of logits that lie on a device: all rows together, where they lie. Only what was
// drawn comes to the host.
#pragma once

#include <span>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/sample/sampler.h"

namespace sluice {

struct RowToSample {
  const SamplingParameters& parameters;
  std::span<const TokenId> seen;  // as Sampler::draw takes them
  double random;
};

// `logits` [n, V] float32 or bfloat16; one row to sample for each. What Sampler::draw gives for each row, up to the
// rounding of exponentials and sums: a number that falls between two ids within it may pick the other. Waits for the
// device once. NaN error (exit code 5) if a logit is not finite; minus infinity masks an id.
std::vector<SampledToken> draw_rows(const Tensor& logits, std::int64_t drawable, std::span<const RowToSample> rows);

}  // namespace sluice
