// SPDX-License-Identifier: Apache-2.0
// Expert parallelism (Lepikhin et al. 2020, GShard): experts lie on several ranks, and tokens go to them and back. A
// token goes to each rank once, however many of its experts are there, and one sum of what they give comes back.
#pragma once

#include "sluice/layers/experts.h"
#include "sluice/parallel/group.h"

namespace sluice {

// Visits of tokens to the experts of this rank: M lines, a visit each.
struct ExpertLines {
  Tensor rows;     // [M] int64: which of the rows that came
  Tensor experts;  // [M] int64: of this rank's
  Tensor weights;  // [M] float32, differentiable
};

// How often each of 0 .. size - 1 is among `values` [M] int64: [size] int64.
Tensor count_of_each(const Tensor& values, std::int64_t size);

// All ranks of the group make one for each pass, and call dispatch() and combine() once; their numbers of tokens may
// differ and be 0. Alone, no token moves.
class ExpertExchange {
 public:
  // `experts`: how many each rank holds, in the order of ranks.
  ExpertExchange(const Routing& routing, std::int64_t experts, const Group& group);

  const ExpertLines& lines() const { return lines_; }

  // x [T, D] of this rank's tokens to the rows [R, D] that go to its experts. Differentiable, as combine() is.
  Tensor dispatch(const Tensor& x) const;

  // What the experts gave for each of those rows, [R, D], to the sums of this rank's tokens [T, D].
  Tensor combine(const Tensor& y) const;

 private:
  Group group_;
  std::int64_t tokens_;
  ExpertLines lines_;
  Tensor sent_tokens_;                         // [rows sent] int64, by rank, then by token
  std::vector<std::int64_t> sent_, received_;  // rows to and from each rank
};

}  // namespace sluice
