// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/grouped_rms_norm.h"
#include "sluice/layers/linear.h"
#include "sluice/layers/residual.h"

namespace sluice {

struct HyperConnectionSizes {
  std::int64_t hidden_size, streams, rank;
  double rms_norm_eps;
  double initializer_range;
};

// Gated low-rank hyper-connection over n residual streams (Qwen3.8-Flash-Next; hyper-connections: Zhu et al. 2024).
// With X [T, n, D] the streams, each normed, and X flat as [T, n D]:
//   M = sigmoid(W_up silu(X W_down^T / n))   x = 1/n sum over s of M_s * X_s         what a part reads
//   inject = 2 sigmoid(X W_inject^T / n)     stream_s += inject_s part(x)            un-normed streams are kept
// The one that ends the decoder mixes alone.
class HyperConnection : public Residual {
 public:
  enum class Role { kPart, kOutput };
  HyperConnection(const HyperConnectionSizes& sizes, Role role);
  Tensor read(const Tensor& residual) const override;
  Tensor around(const Tensor& residual, const Part& part) const override;
  void count_operations(double tokens, Operations& operations) const override;

 private:
  Tensor mix(const Tensor& normed) const;  // [T, n, D] to [T, D]

  std::int64_t streams_;
  GroupedRmsNorm& hc_norm_;
  Linear &input_mix_weight_down_, &input_mix_weight_up_;  // [rank, n D], [n D, rank]
  Linear* block_inject_weight_ = nullptr;                 // [n, n D]; none where nothing goes back
};

}  // namespace sluice
