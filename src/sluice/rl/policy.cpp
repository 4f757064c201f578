// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/policy.h"

#include <algorithm>
#include <functional>

#include "sluice/core/error.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "sluice/train/batch.h"

namespace sluice {
namespace {

struct Scores {
  Tensor logprobs, entropy, values;  // [A] of the pack's trained tokens; values undefined without a value head
};

Scores score(const Policy& policy, const Batch& batch, bool entropy, const Replay& replay) {
  const auto all = policy.decoder.forward(batch.tokens, batch.pack, /*state=*/nullptr, /*router_load=*/nullptr,
                                          /*residual=*/nullptr, replay);
  auto head = policy.decoder.head();
  if (policy.vocabulary < head.size(0)) head = head.narrow(0, 0, policy.vocabulary);
  const auto hidden = all.index_select(0, batch.asked);
  const auto result = linear_cross_entropy(hidden, head, batch.targets, 1 / policy.temperature, entropy);
  return {.logprobs = -result.nll,
          .entropy = result.entropy,
          .values = policy.value_head != nullptr ? policy.value_head->forward(hidden) : Tensor()};
}

// What the model chose for a pack's tokens while they were sampled. The last token of an answer did not go through the
// model then: its choice is free, as are those of a response that comes without.
Choices choices_of(const std::vector<TrainedResponse*>& responses, const PackedBatch& pack,
                   Choices TrainedResponse::*kind) {
  Choices all;
  for (const auto place : pack.samples) {
    const auto& kept = responses[static_cast<std::size_t>(place)]->*kind;
    if (kept.chosen.defined()) all = kept;
  }
  if (!all.chosen.defined()) return {};
  const auto free = [&](std::int64_t tokens) {
    return all.chosen.new_full({tokens, all.chosen.size(1), all.chosen.size(2)}, -1);
  };
  std::vector<Tensor> parts;
  for (const auto place : pack.samples) {
    const auto& response = *responses[static_cast<std::size_t>(place)];
    const auto& kept = (response.*kind).chosen;
    const auto sampled = std::ssize(response.sample.tokens) - 1;
    SLUICE_CHECK(!kept.defined() || kept.size(0) == sampled,
                 "replay: {} has choices for {} tokens; of {} all but the last went through the model",
                 response.sample.place, kept.size(0), sampled + 1);
    parts.insert(parts.end(), {kept.defined() ? kept : free(sampled), free(1)});
  }
  all.chosen = at::cat(parts);
  return all;
}

// The choices that a pack takes.
struct PackReplay {
  ChoiceRecord experts, key_blocks;

  PackReplay(const std::vector<TrainedResponse*>& responses, const PackedBatch& pack)
      : experts(choices_of(responses, pack, &TrainedResponse::experts)),
        key_blocks(choices_of(responses, pack, &TrainedResponse::key_blocks)) {}

  Replay replay() {
    return {.experts = experts.takes() ? &experts : nullptr, .key_blocks = key_blocks.takes() ? &key_blocks : nullptr};
  }
};

// What each response of a pack has, one behind the other.
Tensor gather(const std::vector<TrainedResponse*>& responses, const PackedBatch& pack, at::Device device,
              const std::function<Tensor(const TrainedResponse&, std::int64_t place)>& of) {
  std::vector<Tensor> parts;
  for (std::size_t i = 0; i < pack.samples.size(); ++i) {
    parts.push_back(of(*responses[static_cast<std::size_t>(pack.samples[i])], static_cast<std::int64_t>(i)));
  }
  return at::cat(parts).to(device);
}

struct PackTokens : ObjectiveTokens {
  Tensor counted;  // [A] 1, or 0 where the response is masked
};

// Everything but the log-probabilities that are trained.
PackTokens tokens_of(const std::vector<TrainedResponse*>& responses, const std::vector<double>& weights,
                     const PackedBatch& pack, at::Device device) {
  const auto spread = [](const TrainedResponse& r, double value) { return at::full({r.tokens()}, value, kFloat); };
  PackTokens t;
  const auto all = [&](const auto& of) { return gather(responses, pack, device, of); };
  t.advantages = all([](const TrainedResponse& r, std::int64_t) { return r.advantages; });
  t.counted = all([&](const TrainedResponse& r, std::int64_t) { return spread(r, r.counted ? 1 : 0); });
  t.weights = all([&](const TrainedResponse& r, std::int64_t i) {
    return spread(r, weights[static_cast<std::size_t>(pack.samples[static_cast<std::size_t>(i)])]);
  });
  t.rollout = all([](const TrainedResponse& r, std::int64_t) { return r.rollout_logprobs; });
  t.response = all([](const TrainedResponse& r, std::int64_t i) { return at::full({r.tokens()}, i, kLong); });
  t.responses = std::ssize(pack.samples);
  const auto& first = *responses[static_cast<std::size_t>(pack.samples.front())];
  if (first.old_logprobs.defined()) t.old = all([](const auto& r, std::int64_t) { return r.old_logprobs; });
  if (first.reference_logprobs.defined()) {
    t.reference = all([](const auto& r, std::int64_t) { return r.reference_logprobs; });
  }
  if (first.old_values.defined()) {
    t.old_values = all([](const auto& r, std::int64_t) { return r.old_values; });
    t.returns = all([](const auto& r, std::int64_t) { return r.returns; });
  }
  return t;
}

PolicyStats stats_of(const PackTokens& t, const PolicyTerms& terms, const Tensor& entropy) {
  const at::NoGradGuard no_grad;
  const auto sum = [&](const Tensor& x) { return (x.to(kDouble) * t.counted).sum(); };
  const auto largest = [&](const Tensor& x) { return (x.to(kDouble) * t.counted).max(); };
  const auto drift = t.old - t.rollout;
  const auto& correction = terms.correction;
  const auto none = at::zeros({}, t.counted.options().dtype(kDouble));
  const bool values = terms.value.loss.defined();
  const auto told =
      at::stack({t.counted.sum().to(kDouble), terms.loss.to(kDouble),
                 (terms.policy.loss * correction * t.weights).sum().to(kDouble), sum(terms.kl), sum(entropy),
                 sum(terms.policy.clipped_low), sum(terms.policy.clipped_high), sum(terms.policy.dual),
                 sum(t.old - t.logprobs), largest((t.logprobs - t.old).exp()), sum(drift.abs()), largest(drift.abs()),
                 sum(drift.exp() - drift - 1), sum(correction), sum(correction * correction), sum(correction == 0),
                 largest(correction), values ? (terms.value.loss * t.weights).sum().to(kDouble) : none,
                 values ? sum(terms.value.clipped) : none})
          .cpu();
  const auto* v = told.const_data_ptr<double>();
  return {.tokens = v[0],
          .loss = v[1],
          .policy_loss = v[2],
          .kl = v[3],
          .entropy = v[4],
          .value_loss = v[17],
          .value_clipped = v[18],
          .clipped_low = v[5],
          .clipped_high = v[6],
          .dual = v[7],
          .old_minus_new = v[8],
          .ratio_max = v[9],
          .mismatch = v[10],
          .mismatch_max = v[11],
          .mismatch_kl = v[12],
          .correction = v[13],
          .correction_square = v[14],
          .correction_zero = v[15],
          .correction_max = v[16]};
}

// One pack's part of the step's loss; adds what there is to tell about it.
Tensor pack_loss(const Policy& policy, const ObjectiveSettings& objective,
                 const std::vector<TrainedResponse*>& responses, const std::vector<double>& weights,
                 const PackedBatch& pack, PackReplay& replay, PolicyStats& stats) {
  const auto device = policy.decoder.device();
  auto tokens = tokens_of(responses, weights, pack, device);
  const auto scores = score(policy, to_batch(pack, device), /*entropy=*/true, replay.replay());
  tokens.logprobs = scores.logprobs;
  tokens.entropy = scores.entropy;
  tokens.values = scores.values;
  if (!tokens.old.defined()) tokens.old = scores.logprobs.detach();
  const auto terms = policy_objective(tokens, objective);
  auto found = stats_of(tokens, terms, scores.entropy);
  found.routed = static_cast<double>(replay.experts.rows());
  found.rerouted = static_cast<double>(replay.experts.differing());
  found.indexed = static_cast<double>(replay.key_blocks.rows());
  found.reindexed = static_cast<double>(replay.key_blocks.differing());
  stats.add(found);
  return terms.loss;
}

}  // namespace

void PolicyStats::add(const PolicyStats& o) {
  for (const auto sum : {&PolicyStats::tokens,
                         &PolicyStats::loss,
                         &PolicyStats::policy_loss,
                         &PolicyStats::kl,
                         &PolicyStats::entropy,
                         &PolicyStats::value_loss,
                         &PolicyStats::value_clipped,
                         &PolicyStats::clipped_low,
                         &PolicyStats::clipped_high,
                         &PolicyStats::dual,
                         &PolicyStats::old_minus_new,
                         &PolicyStats::mismatch,
                         &PolicyStats::mismatch_kl,
                         &PolicyStats::correction,
                         &PolicyStats::correction_square,
                         &PolicyStats::correction_zero,
                         &PolicyStats::routed,
                         &PolicyStats::rerouted,
                         &PolicyStats::indexed,
                         &PolicyStats::reindexed}) {
    this->*sum += o.*sum;
  }
  for (const auto most : {&PolicyStats::ratio_max, &PolicyStats::mismatch_max, &PolicyStats::correction_max}) {
    this->*most = std::max(this->*most, o.*most);
  }
}

ReplayCoverage check_replay(const std::vector<TrainedResponse>& responses, bool strict) {
  ReplayCoverage found;
  if (!strict && std::ranges::none_of(responses, [](const auto& r) { return r.experts.chosen.defined(); }))
    return found;
  for (const auto& response : responses) {
    const auto& kept = response.experts.chosen;
    const auto tokens = std::ssize(response.sample.tokens) - 1;
    const auto missing = kept.defined() ? (kept.select(2, 0) < 0).any(1).sum().item<std::int64_t>() : tokens;
    if (strict && missing > 0) {
      fail(ExitCode::kRuntime,
           "{}: of {} tokens of an answer and its prompt, {} come without the experts that they went to while "
           "sampling.\n  Without rollout.strict_replay they choose anew, and rollout/router_missing_frac counts them.",
           response.sample.place, tokens, missing);
    }
    found.tokens += tokens;
    found.missing += missing;
  }
  return found;
}

std::vector<PackedBatch> pack_responses(const std::vector<TrainedResponse*>& responses, std::int64_t seq_len) {
  std::vector<Sample> samples;
  std::vector<std::int64_t> order, lengths;
  for (const auto* response : responses) {
    order.push_back(std::ssize(order));
    lengths.push_back(std::ssize(response->sample.tokens));
    samples.push_back(response->sample);
  }
  std::vector<PackedBatch> packs;
  for (const auto& places : best_fit_packs(order, lengths, seq_len)) packs.push_back(pack(samples, places));
  return packs;
}

std::vector<ResponseScores> score_responses(const Policy& policy, const std::vector<TrainedResponse*>& responses,
                                            const std::vector<PackedBatch>& packs, bool replay) {
  const at::NoGradGuard no_grad;
  std::vector<ResponseScores> found(responses.size());
  for (const auto& pack : packs) {
    const auto batch = to_batch(pack, policy.decoder.device());
    PackReplay sampled(responses, pack);
    const auto scores = score(policy, batch, /*entropy=*/false, replay ? sampled.replay() : Replay{});
    const auto logprobs = scores.logprobs.cpu(), values = scores.values.defined() ? scores.values.cpu() : Tensor();
    std::int64_t begin = 0;
    for (const auto place : pack.samples) {
      const auto i = static_cast<std::size_t>(place);
      const auto own = [&](const Tensor& x) { return x.narrow(0, begin, responses[i]->tokens()); };
      found[i] = {.logprobs = own(logprobs), .values = values.defined() ? own(values) : Tensor()};
      begin += responses[i]->tokens();
    }
  }
  return found;
}

PolicyUpdate update_policy(const Policy& policy, const AlgorithmSettings& algorithm,
                           const std::vector<TrainedResponse*>& responses, std::int64_t seq_len, std::int64_t longest,
                           GradientSum& gradients, AdamW& optimizer, const UpdateSettings& settings) {
  std::vector<std::int64_t> lengths;
  for (const auto* response : responses) lengths.push_back(response->counted ? response->tokens() : 0);
  PolicyUpdate result;
  if (std::ranges::all_of(lengths, [](auto length) { return length == 0; })) {
    result.skipped = true;
    return result;
  }
  const auto weights = response_weights(lengths, algorithm.aggregation, longest);
  const auto packs = pack_responses(responses, seq_len);
  std::vector<PackReplay> replays;  // the backward pass may compute blocks again and asks for them then
  for (const auto& pack : packs) replays.emplace_back(responses, pack);
  const auto norm = update(
      packs.size(),
      [&](std::size_t i, bool last) {
        const auto loss =
            pack_loss(policy, algorithm.objective, responses, weights, packs[i], replays[i], result.stats);
        gradients.add(loss, last);
        return loss.detach();
      },
      gradients, optimizer, settings);
  result.grad_norm = norm.item<double>();
  check_finite(result.stats.loss, result.grad_norm, gradients, settings.step);
  gradients.clear();
  return result;
}

}  // namespace sluice
