// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/parameter.h"

namespace sluice {

// y = x W^T without bias; W [out, in] is the parameter "weight".
class Linear : public Module {
 public:
  Linear(std::int64_t out_features, std::int64_t in_features, double initializer_range);
  Tensor forward(const Tensor& x) const;  // [..., in] to [..., out]
  const Tensor& weight() const { return weight_.value; }
  bool is_adapted() const { return weight_.adapter != nullptr; }  // forward() does more than multiply by the weight
  double operations(double tokens) const { return 2 * tokens * static_cast<double>(weight_.size()); }

 private:
  Parameter& weight_;
};

// Rows of a table W [vocabulary, D], the parameter "weight": of the embedding, or of the head, whose products with
// hidden states linear_cross_entropy and the sampler form themselves.
class Embedding : public Module {
 public:
  Embedding(std::int64_t vocab_size, std::int64_t hidden_size, double initializer_range);
  Tensor forward(const Tensor& tokens) const;  // [T] int64 to [T, D]
  const Tensor& weight() const { return weight_.value; }

 private:
  Parameter& weight_;
};

}  // namespace sluice
