// SPDX-License-Identifier: Apache-2.0
// The gated delta rule over a pack whose pieces lie on the ranks of a group. What a sequence leaves its state in goes
// from rank to rank: over a piece, the state at its end is linear in the one at its beginning,
//   S_end = A S_begin + B    A [K, K], B [K, V] for each value head,
// so ranks that hold the middle of a sequence work out A and B without waiting for it (B is the rule's final state from
// zero, A that from the identity with values of zero). These are small. Every rank gets them all and has its S_begin;
// backward, dS_begin = A^T dS_end + C likewise, with C the gradient of S_begin when that of S_end is zero.
// Whatever needs none of them is computed before they are waited for, or while.
#pragma once

#include <optional>
#include <vector>

#include "sluice/layers/pack_pieces.h"

namespace sluice {

// What the rule takes, of this rank's tokens; shapes and dtypes as in kernels/gated_delta_rule.
struct DeltaInputs {
  Tensor q, k, v, g, beta;
};

// Consecutive sequences of a piece that are computed in one call.
struct DeltaRun {
  std::int64_t first, count;  // its tokens in the piece
  Tensor cu_seqlens;
  bool begun = false, goes_on = false;  // one sequence, which has tokens before it, or after it
  std::optional<Tensor> initial_state = {};
  Tensor checkpoints = {};  // of sequences that no other rank shares
};

// What the backward pass takes besides the inputs.
struct DeltaLinks {
  std::vector<DeltaRun> runs;
  std::vector<Tensor> transitions;  // A [Hv, K, K] of each rank; undefined where no sequence passes through
};

struct LinkedDeltaOutput {
  Tensor out;  // [T, Hv, V]
  DeltaLinks links;
};

// q and k are divided by their norms. Takes no part in autograd.
LinkedDeltaOutput linked_delta_rule(const DeltaInputs& x, const Pack& pack, const std::vector<PackPiece>& pieces,
                                    const Group& group, double scale);

// The gradients of q, k and v take their place. Gives those of g and beta.
struct LinkedDeltaGradients {
  Tensor g, beta;
};
LinkedDeltaGradients linked_delta_rule_backward(const Tensor& grad_out, DeltaInputs& x, const DeltaLinks& links,
                                                const std::vector<PackPiece>& pieces, const Group& group, double scale);

}  // namespace sluice
