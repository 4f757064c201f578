// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/linked_delta_rule.h"

#include <algorithm>
#include <functional>
#include <tuple>

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

// Each rank's matrices [Hv, .., ..], from those ranks that have one. The call of what comes back waits for them.
std::function<std::vector<Tensor>()> start_gather(const Tensor& own, const std::vector<bool>& has,
                                                  at::IntArrayRef shape, const Group& group,
                                                  const at::TensorOptions& options) {
  std::vector<std::int64_t> rows;
  for (const auto one : has) rows.push_back(one ? shape[0] : 0);
  const auto none = at::empty({0, shape[1], shape[2]}, options);
  return [rows, gathered = start_all_gather_rows(own.defined() ? own : none, rows, group)] {
    return gathered().split_with_sizes(rows);
  };
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
  const auto compute = [&](std::size_t i) {
    auto& run = runs[i];
    const auto in = tokens_of(run, x);
    auto output = gated_delta_rule(in.q, in.k, in.v, in.g, in.beta, run.cu_seqlens, std::nullopt, scale,
                                   /*qk_l2norm=*/true, /*output_final_state=*/run.goes_on);
    outs[i] = output.out;
    if (!run.goes_on) run.checkpoints = output.checkpoints;
    return output.final_state;
  };
  // Of the sequence that began earlier.
  const auto prepare = [&] {
    const auto in = tokens_of(runs[0], x);
    return gated_delta_rule_prepare(in.q, in.k, in.v, in.g, in.beta, runs[0].cu_seqlens, scale, /*qk_l2norm=*/true);
  };
  const auto compute_prepared = [&](const Tensor& prepared, const Tensor& v, const std::optional<Tensor>& initial_state,
                                    bool output_final_state) {
    const auto in = tokens_of(runs[0], x);
    return gated_delta_rule_prepared(prepared, in.q, in.k, v, in.g, in.beta, runs[0].cu_seqlens, initial_state, scale,
                                     /*qk_l2norm=*/true, output_final_state);
  };

  // 1. What other ranks wait for.
  Tensor prepared, transition;
  if (own.is_inside()) {
    prepared = prepare();
    const auto zeros = at::zeros({own.count, heads, key_dim}, x.v.options());
    const auto identity = at::eye(key_dim, x.g.options()).expand({1, heads, key_dim, key_dim}).contiguous();
    state = compute_prepared(prepared, tokens_of(runs[0], x).v, std::nullopt, true).final_state[0];
    transition = compute_prepared(prepared, zeros, identity, true).final_state[0];
  } else if (own.goes_on) {
    state = compute(runs.size() - 1)[0];
  }

  // 2. The states at the ranks' ends; and, while they are on their way, what does not need them.
  const bool linked = std::ranges::any_of(pieces, goes_on);
  std::function<std::vector<Tensor>()> states, transitions;
  if (linked) {
    states = start_gather(state, which(pieces, goes_on), {heads, key_dim, value_dim}, group, x.g.options());
    transitions = start_gather(transition, which(pieces, is_inside), {heads, key_dim, key_dim}, group, x.g.options());
  }
  if (own.begun > 0 && !own.is_inside()) prepared = prepare();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].begun && !runs[i].goes_on) compute(i);
  }

  // 3. With them the state at this rank's beginning, and the sequence that waited for it.
  if (linked) {
    const auto ends = states();
    result.links.transitions = transitions();
    Tensor begin;
    for (std::int64_t rank = 0; rank < group.rank(); ++rank) {
      if (pieces[rank].is_inside()) {
        begin = at::baddbmm(ends[rank], result.links.transitions[rank], begin);
      } else if (pieces[rank].goes_on) {
        begin = ends[rank];
      }
    }
    if (own.begun > 0) {
      runs[0].initial_state = begin.unsqueeze(0);
      outs[0] = compute_prepared(prepared, tokens_of(runs[0], x).v, runs[0].initial_state, false).out;
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
  const auto grad_out_of = [&](const DeltaRun& run) { return grad_out.narrow(0, run.first, run.count); };

  // 1. Of sequences that other ranks share, what others wait for, or what waits for nobody.
  std::vector<std::optional<GatedDeltaBackward>> passes(runs.size());
  Tensor grad_state;  // of the state at the beginning; of a sequence that goes on, without that at its end: C
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& run = runs[i];
    if (!run.begun && !run.goes_on) continue;
    const auto in = tokens_of(run, x);
    passes[i].emplace(grad_out_of(run), in.q, in.k, in.v, in.g, in.beta, run.cu_seqlens, run.initial_state, scale,
                      /*qk_l2norm=*/true, /*from_zero=*/run.begun);
    if (run.begun) grad_state = passes[i]->grad_initial_state()[0];
  }
  const auto finish = [&](std::size_t i, const std::optional<Tensor>& grad_final_state) {
    auto to = tokens_of(runs[i], x);
    std::tie(parts[i].g, parts[i].beta) = passes[i]->finish(grad_final_state, to.q, to.k, to.v);
    passes[i].reset();
  };

  // 2. The gradients at the ranks' beginnings; and, while they are on their way, what does not need them.
  const bool linked = std::ranges::any_of(pieces, begins_earlier);
  std::function<std::vector<Tensor>()> gathered;
  if (linked) {
    gathered =
        start_gather(grad_state, which(pieces, begins_earlier), {heads, key_dim, value_dim}, group, x.g.options());
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& run = runs[i];
    if (run.goes_on) continue;
    if (run.begun) {
      finish(i, std::nullopt);
      continue;
    }
    auto in = tokens_of(run, x);
    const auto grads = gated_delta_rule_backward(grad_out_of(run), std::nullopt, in.q, in.k, in.v, in.g, in.beta,
                                                 run.cu_seqlens, run.initial_state, run.checkpoints, scale,
                                                 /*qk_l2norm=*/true, in.q, in.k, in.v);
    parts[i] = {grads.g, grads.beta};
  }

  // 3. With them the gradient of the state at this rank's end, and the sequence that waited for it.
  if (linked) {
    const auto grads = gathered();
    Tensor end;
    for (auto rank = group.size() - 1; rank > group.rank(); --rank) {
      if (pieces[rank].is_inside()) {
        end = at::baddbmm(grads[rank], links.transitions[rank].transpose(1, 2), end);
      } else if (pieces[rank].begun > 0) {
        end = grads[rank];
      }
    }
    if (own.goes_on) finish(runs.size() - 1, end.unsqueeze(0));
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
