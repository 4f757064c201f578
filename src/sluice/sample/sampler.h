// SPDX-License-Identifier: Apache-2.0
// From a row of logits to a token. The filters act in this order, each on what the one before left:
//   repetition penalty   logits of ids that the sequence holds, prompt included: z / penalty if z > 0, else z * penalty
//                        (Keskar et al. 2019, "CTRL")
//   temperature          z / T
//   top-k                the k largest; ids that tie with the k-th stay
//   top-p                the fewest, largest first, whose probability together reaches p (Holtzman et al. 2020, "The
//                        curious case of neural text degeneration"); of equal ones the lowest ids; at least one
//   min-p                those with at least min_p times the largest probability (Nguyen et al. 2024, "Turning up the
//                        heat: min-p sampling")
// This is the order and meaning of transformers' logits processors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/data/tokenizer.h"

namespace sluice {

struct SamplingParameters {
  double temperature = 1;  // 0: the largest logit, of equal ones the lowest id; top-k, top-p, min-p have no effect
  std::int64_t top_k = 0;  // 0: all
  double top_p = 1;        // 1: all
  double min_p = 0;        // 0: all
  double repetition_penalty = 1;  // 1: none
  std::uint64_t seed = 42;
  std::uint64_t sequence = 0;  // of the random stream: sequences with one seed and different numbers are independent
  std::uint64_t drawn = 0;     // numbers of the stream that earlier turns of the sequence have used

  // Usage error for a value outside its range.
  void check() const;
};

struct SampledToken {
  TokenId id;
  float logprob;  // under the distribution that it was drawn from, all filters applied; at temperature 0, as below
  float model_logprob;  // under the model: log_softmax of the untouched logits over the whole row
};

// Draws tokens; keeps its buffers between calls, so one serves one thread.
class Sampler {
 public:
  // Ids from `drawable` on are never drawn: rows of the head that belong to no token.
  explicit Sampler(std::int64_t drawable) : drawable_(drawable) {}

  // `logits`: one row, at least `drawable` long. `seen`: the distinct ids of the sequence so far, read only with a
  // repetition penalty. `random` in [0, 1) picks from the distribution, ids in rising order. NaN error (exit code 5) if
  // the logits are not finite.
  SampledToken draw(std::span<const float> logits, const SamplingParameters& parameters, std::span<const TokenId> seen,
                    double random);

 private:
  // Scores and, in the same places, ids. Without ids the place is the id.
  struct Candidates {
    std::span<const float> scores;
    std::span<const TokenId> ids;
    TokenId id(std::size_t place) const { return ids.empty() ? static_cast<TokenId>(place) : ids[place]; }
  };
  struct Ranked {
    float score, weight;
    TokenId id;
    bool before(const Ranked& other) const { return score != other.score ? score > other.score : id < other.id; }
  };

  std::span<const float> penalized(std::span<const float> logits, double penalty, std::span<const TokenId> seen);
  double weigh(std::span<const float> scores, float top, double temperature);
  Candidates keep_from(const Candidates& from, float lowest);
  Candidates top_k(const Candidates& from, std::int64_t k);
  Candidates top_p(const Candidates& from, double p, float top, double temperature);
  std::size_t pick(double target, std::size_t count) const;

  std::int64_t drawable_;
  std::vector<float> penalized_, kept_scores_, largest_;
  std::vector<TokenId> kept_ids_;
  std::vector<Ranked> ranked_;
  std::vector<float> weights_;      // exp((score - top) / T) of the candidates that weigh() saw last
  std::vector<double> block_sums_;  // of weights_, kBlock at a time
};

}  // namespace sluice
