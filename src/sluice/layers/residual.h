// SPDX-License-Identifier: Apache-2.0
// The residual that runs through a decoder: how the parts of a block read it, and how what they give goes back into it.
#pragma once

#include <functional>

#include "sluice/layers/operations.h"
#include "sluice/layers/parameter.h"

namespace sluice {

// T tokens, D hidden size, R width of the residual: D, or several streams of D one behind the other.
class Residual : public Module {
 public:
  using Part = std::function<Tensor(const Tensor& x)>;  // [T, D] to [T, D]

  // What a part sees of the residual: [T, R] to [T, D].
  virtual Tensor read(const Tensor& residual) const = 0;

  // The residual [T, R] after `part` read it and its output went back.
  virtual Tensor around(const Tensor& residual, const Part& part) const = 0;

  // Adds its own operations, without a part's, over that many tokens.
  virtual void count_operations(double tokens, Operations& operations) const = 0;
};

// One stream with a zero-centred RMSNorm before each part: h + part(norm(h)). Its weight is the parameter "weight".
class PreNorm : public Residual {
 public:
  PreNorm(std::int64_t hidden_size, double eps);
  Tensor read(const Tensor& residual) const override;
  Tensor around(const Tensor& residual, const Part& part) const override;
  void count_operations(double, Operations&) const override {}  // a norm is not counted

 private:
  Parameter& weight_;
  double eps_;
};

}  // namespace sluice
