// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/pack.h"
#include "sluice/layers/parameter.h"

namespace sluice {

// y = x W^T without bias; W [out, in] is the parameter "weight".
class Linear : public Module {
 public:
  Linear(std::int64_t out_features, std::int64_t in_features, double initializer_range, Split split = {});
  Tensor forward(const Tensor& x) const;  // [..., in] to [..., out]; of a split weight what this rank's piece gives
  const Tensor& weight() const { return weight_.value; }
  Tensor adapted(const Tensor& y, const Tensor& x) const;         // y = x W^T with what an adapter adds
  bool is_adapted() const { return weight_.adapter != nullptr; }  // forward() does more than multiply by the weight
  double operations(double tokens) const { return 2 * tokens * static_cast<double>(weight_.size()); }

 private:
  Parameter& weight_;
};

// Rows of a table W [vocabulary, D], the parameter "weight": of the embedding, or of the head, whose products with
// hidden states the loss and the sampler form themselves. A tensor rank has some of the rows.
class Embedding : public Module {
 public:
  Embedding(std::int64_t vocab_size, std::int64_t hidden_size, double initializer_range);
  Tensor forward(const Tensor& tokens, const ForwardContext& context) const;  // [T] int64 to [own tokens, D]
  const Tensor& weight() const { return weight_.value; }

 private:
  Parameter& weight_;  // [V, D]
};

}  // namespace sluice
