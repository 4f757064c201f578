// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/parameter.h"

namespace sluice {

// Zero-centred RMSNorm over each of G groups of features, with one weight of the whole width, drawn as 0.
class GroupedRmsNorm : public Module {
 public:
  GroupedRmsNorm(std::int64_t groups, std::int64_t size, double eps);
  Tensor forward(const Tensor& x) const;  // [T, G size] to [T, G, size]

 private:
  std::int64_t groups_;
  Parameter& weight_;
  double eps_;
};

}  // namespace sluice
