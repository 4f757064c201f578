// SPDX-License-Identifier: Apache-2.0
// How a row's token is drawn and what comes of it, as rows of a float64 tensor.
#pragma once

namespace sluice {

struct DrawSettings {
  double temperature = 1;  // 0: the largest score, of equal ones the lowest id; top-k, top-p, min-p have no effect
  double top_k = 0;        // a whole number; 0: all
  double top_p = 1;        // from 0 to 1; 1: all
  double min_p = 0;        // from 0 to 1; 0: all
  double repetition_penalty = 1;  // above 0
  double random = 0;              // in [0, 1)
};
inline constexpr int kDrawSettings = sizeof(DrawSettings) / sizeof(double);

struct DrawnToken {
  double id;
  double logprob;        // under the distribution that it was drawn from; at temperature 0 as below
  double model_logprob;  // log_softmax of the untouched logits over the whole row
};
inline constexpr int kDrawnToken = sizeof(DrawnToken) / sizeof(double);

}  // namespace sluice
