// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/linked_delta_rule.h"

#include <algorithm>

#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

DeltaInputs tokens_of(const DeltaRun& run, const DeltaInputs& x) {
  const auto take = [&](const Tensor& t) { return t.narrow(0, run.first, run.count); };
  return {take(x.q), take(x.k), take(x.v), take(x.g), take(x.beta)};
}

// A sequence that began before the piece, the ones that lie within it, and one that goes on after it: only the first
// waits for a state, and only the last gives one.
std::vector<DeltaRun> runs_of(const Pack& pack, const PackPiece& piece) {
  std::vector<DeltaRun> runs;
  std::int64_t first = 0;
  const auto add = [&](std::size_t begin, std::size_t end, bool begun, bool goes_on) {
    const std::vector<std::int64_t> lengths(piece.lengths.begin() + static_cast<std::ptrdiff_t>(begin),
                                            piece.lengths.begin() + static_cast<std::ptrdiff_t>(end));
    std::int64_t count = 0;
    for (const auto length : lengths) count += length;
    runs.push_back({.first = first,
                    .count = count,
                    .cu_seqlens = cu_seqlens_of(pack, lengths),
                    .begun = begun,
                    .goes_on = goes_on});
    first += count;
  };
  const auto sequences = piece.lengths.size();
  const bool begun = piece.begun > 0;
  if (sequences == 1 && (begun || piece.goes_on)) {
    add(0, 1, begun, piece.goes_on);
    return runs;
  }
  const std::size_t begin = begun ? 1 : 0, end = piece.goes_on ? sequences - 1 : sequences;
  if (begun) add(0, 1, true, false);
  if (begin < end) add(begin, end, false, false);
  if (piece.goes_on) add(end, sequences, false, true);
  return runs;
}

GatedDeltaOutput rule(const DeltaRun& run, const DeltaInputs& x, const std::optional<Tensor>& initial_state,
                      double scale, bool output_final_state) {
  return gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, run.cu_seqlens, initial_state, scale, /*qk_l2norm=*/true,
                          output_final_state);
}

// Each rank's matrices [Hv, .., ..], from those ranks that have one.
std::vector<Tensor> gather_matrices(const Tensor& own, const std::vector<bool>& has, at::IntArrayRef shape,
                                    const Group& group, const at::TensorOptions& options) {
  std::vector<std::int64_t> rows;
  for (const auto one : has) rows.push_back(one ? shape[0] : 0);
  const auto none = at::empty({0, shape[1], shape[2]}, options);
  return all_gather_rows(own.defined() ? own : none, rows, group).split_with_sizes(rows);
}

std::vector<bool> which(const std::vector<PackPiece>& pieces, bool (*has)(const PackPiece&)) {
  std::vector<bool> result;
  for (const auto& piece : pieces) result.push_back(has(piece));
  return result;
}
bool begins_earlier(const PackPiece& piece) { return piece.begun > 0; }
bool goes_on(const PackPiece& piece) { return piece.goes_on; }
bool is_inside(const PackPiece& piece) { return piece.is_inside(); }

}  // namespace

LinkedDeltaOutput linked_delta_rule(const DeltaInputs& x, const Pack& pack, const std::vector<PackPiece>& pieces,
                                    const Group& group, double scale) {
  const auto& own = pieces[group.rank()];
  const auto heads = x.v.size(1), key_dim = x.k.size(2), value_dim = x.v.size(2);
  LinkedDeltaOutput result{.out = {}, .links = {.runs = runs_of(pack, own), .transitions = {}}};
  auto& runs = result.links.runs;
  std::vector<Tensor> outs(runs.size());
  Tensor state;  // at the end of the run: B of a sequence that goes on
  const auto compute = [&](std::size_t i, bool output_final_state) {
    auto output = rule(runs[i], tokens_of(runs[i], x), runs[i].initial_state, scale, output_final_state);
    outs[i] = output.out;
    runs[i].checkpoints = output.checkpoints;
    return output.final_state;
  };

  // 1. What waits for no other rank.
  Tensor transition;
  if (own.is_inside()) {
    auto tokens = tokens_of(runs[0], x);
    state = rule(runs[0], tokens, std::nullopt, scale, true).final_state[0];
    tokens.v = at::zeros({runs[0].count, heads, key_dim}, x.v.options());
    const auto identity = at::eye(key_dim, x.g.options()).expand({1, heads, key_dim, key_dim}).contiguous();
    transition = rule(runs[0], tokens, identity, scale, true).final_state[0];
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].begun) continue;
    const auto final_state = compute(i, runs[i].goes_on);
    if (runs[i].goes_on) state = final_state[0];
  }

  // 2. The states at the ranks' ends, and with them the one at this rank's beginning.
  if (std::ranges::any_of(pieces, goes_on)) {
    const auto states =
        gather_matrices(state, which(pieces, goes_on), {heads, key_dim, value_dim}, group, x.g.options());
    result.links.transitions =
        gather_matrices(transition, which(pieces, is_inside), {heads, key_dim, key_dim}, group, x.g.options());
    Tensor begin;
    for (std::int64_t rank = 0; rank < group.rank(); ++rank) {
      if (pieces[rank].is_inside()) {
        begin = at::baddbmm(states[rank], result.links.transitions[rank], begin);
      } else if (pieces[rank].goes_on) {
        begin = states[rank];
      }
    }
    // 3. The sequence that waited for it.
    if (own.begun > 0) {
      runs[0].initial_state = begin.unsqueeze(0);
      compute(0, /*output_final_state=*/false);
    }
  }
  result.out = outs.empty() ? at::empty_like(x.v) : outs.size() == 1 ? outs[0] : at::cat(outs);
  return result;
}

LinkedDeltaGradients linked_delta_rule_backward(const Tensor& grad_out, DeltaInputs& x, const DeltaLinks& links,
                                                const std::vector<PackPiece>& pieces, const Group& group,
                                                double scale) {
  const auto& own = pieces[group.rank()];
  const auto heads = x.v.size(1), key_dim = x.k.size(2), value_dim = x.v.size(2);
  const auto& runs = links.runs;
  std::vector<LinkedDeltaGradients> parts(runs.size());
  // Gives the gradient of the run's initial state. Gradients of q, k and v go to `to`.
  const auto differentiate = [&](std::size_t i, const std::optional<Tensor>& grad_final_state, DeltaInputs to) {
    const auto& run = runs[i];
    const auto in = tokens_of(run, x);
    const auto grads = gated_delta_rule_backward(grad_out.narrow(0, run.first, run.count), grad_final_state, in.q, in.k,
                                                 in.v, in.g, in.beta, run.cu_seqlens, run.initial_state,
                                                 run.checkpoints, scale, /*qk_l2norm=*/true, to.q, to.k, to.v);
    parts[i] = {grads.g, grads.beta};
    return grads.initial_state;
  };
  const auto in_place = [&](std::size_t i, const std::optional<Tensor>& grad_final_state) {
    return differentiate(i, grad_final_state, tokens_of(runs[i], x));
  };

  // 1. What waits for no other rank.
  Tensor grad_state;  // of the state at the beginning: C
  if (own.is_inside()) {
    grad_state =
        differentiate(0, std::nullopt, {at::empty_like(x.q), at::empty_like(x.k), at::empty_like(x.v), {}, {}})[0];
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].goes_on) continue;
    const auto grad = in_place(i, std::nullopt);
    if (runs[i].begun) grad_state = grad[0];
  }

  // 2. The gradients at the ranks' beginnings, and with them the one at this rank's end.
  if (std::ranges::any_of(pieces, begins_earlier)) {
    const auto grads =
        gather_matrices(grad_state, which(pieces, begins_earlier), {heads, key_dim, value_dim}, group, x.g.options());
    Tensor end;
    for (auto rank = group.size() - 1; rank > group.rank(); --rank) {
      if (pieces[rank].is_inside()) {
        end = at::baddbmm(grads[rank], links.transitions[rank].transpose(1, 2), end);
      } else if (pieces[rank].begun > 0) {
        end = grads[rank];
      }
    }
    // 3. The sequence that waited for it.
    if (own.goes_on) in_place(runs.size() - 1, end.unsqueeze(0));
  }
  if (parts.size() == 1) return parts[0];
  LinkedDeltaGradients result{at::empty_like(x.g), at::empty_like(x.beta)};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    result.g.narrow(0, runs[i].first, runs[i].count).copy_(parts[i].g);
    result.beta.narrow(0, runs[i].first, runs[i].count).copy_(parts[i].beta);
  }
  return result;
}

}  // namespace sluice
