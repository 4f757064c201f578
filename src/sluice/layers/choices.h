// SPDX-License-Identifier: Apache-2.0
// Discrete choices that blocks of a decoder make for tokens: the experts of a router, the blocks of keys of an indexer.
// They are kept in one forward pass and taken in another (router replay, Ma et al. 2025, arXiv 2510.11370), so that
// training goes where sampling went. Only the choice is taken, never a weight or score.
#pragma once

#include <cstdint>
#include <vector>

#include "sluice/layers/pack.h"

namespace sluice {

struct Choices {
  std::vector<std::int64_t> blocks;  // numbers of the decoder's blocks that choose, rising
  Tensor chosen;                     // [tokens, blocks, k] int16; undefined: none of them chooses
};

// What makes a row of numbers a choice besides that they differ: nothing, or that they rise.
enum class ChoiceOrder { kAny, kRising };

// The choices of one kind in one forward pass, and in its recomputation.
class ChoiceRecord {
 public:
  ChoiceRecord() = default;                                           // keeps them
  explicit ChoiceRecord(Choices taken) : taken_(std::move(taken)) {}  // takes these, unless there are none

  // Where choices are kept: keeps `live` [t, k], what the context's block chooses for the pack's tokens from
  // context.first_token on, each below its token's number of options, at most 2^15.
  void keep(const Tensor& live, const ForwardContext& context);

  // Where choices are taken: the one to follow instead of `live`, in its dtype, `live` itself where a row of theirs
  // begins with -1: of a token whose choice is not known. `options`: each token's number, [t, 1] int64, or one number
  // of all, []. Internal error, which names the first, for a row that is no choice: not as many as `live` has, one
  // twice, one that is not among the options, or not in `order`.
  Tensor follow(const Tensor& live, const Tensor& options, ChoiceOrder order, const ForwardContext& context);

  bool takes() const { return taken_.chosen.defined(); }
  Choices kept() const;  // on the CPU

  // Of choices that are taken: tokens with a known one, times blocks; those whose live choice is another set.
  std::int64_t rows() const { return rows_; }
  std::int64_t differing() const { return differing_; }

 private:
  Choices taken_;
  std::vector<Tensor> kept_;  // by block; undefined where one does not choose
  std::int64_t rows_ = 0, differing_ = 0;
};

}  // namespace sluice
