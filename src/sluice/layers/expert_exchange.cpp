// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/expert_exchange.h"

#include <cmath>

#include "sluice/layers/split.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

using Counts = std::vector<std::int64_t>;

Counts on_host(const Tensor& counts) {
  const auto there = counts.to(at::kCPU, kLong).contiguous();
  const auto* first = there.const_data_ptr<std::int64_t>();
  return {first, first + there.numel()};
}

}  // namespace

Tensor count_of_each(const Tensor& values, std::int64_t size) {
  return at::zeros({size}, values.options()).scatter_add_(0, values, at::ones_like(values));
}

ExpertExchange::ExpertExchange(const Routing& routing, std::int64_t experts, const Group& group)
    : group_(group), tokens_(routing.experts.size(0)) {
  const auto top_k = routing.experts.size(1), ranks = group.size();
  const auto token = at::arange(tokens_, routing.experts.options()).repeat_interleave(top_k);  // of each visit
  const auto expert = routing.experts.flatten();
  const auto weight = routing.weights.flatten();
  if (ranks == 1 || expert.is_meta()) lines_ = {.rows = token, .experts = expert, .weights = weight};
  if (ranks == 1) return;
  if (expert.is_meta()) {  // no choices are known: as if they were even, and a rank got as many lines as it gives
    const auto missed = std::pow(1 - 1 / static_cast<double>(ranks), static_cast<double>(top_k));
    const auto sent = std::llround(static_cast<double>(tokens_ * ranks) * (1 - missed));
    sent_tokens_ = at::empty({sent}, expert.options());
    for (std::int64_t i = 0; i < ranks; ++i)
      sent_.push_back(piece_begin(sent, ranks, i + 1) - piece_begin(sent, ranks, i));
    received_ = sent_;
    return;
  }

  const auto rank = expert.div(experts, "floor");
  auto goes = at::zeros({ranks, tokens_}, expert.options());
  goes.index_put_({rank, token}, at::ones({}, expert.options()));
  sent_tokens_ = goes.nonzero().select(1, 1);
  const auto row = goes.cumsum(1) - 1;  // [ranks, T]: place of a token among those that go to a rank
  const auto order = rank.argsort(/*stable=*/true, 0, /*descending=*/false);
  const auto sent_visits = at::stack({row.index({rank, token}), expert.remainder(experts)}, 1).index_select(0, order);

  const auto counts = on_host(at::cat({goes.sum(1), count_of_each(rank, ranks)}));
  sent_.assign(counts.begin(), counts.begin() + ranks);
  const Counts lines_sent(counts.begin() + ranks, counts.end());
  Counts lines_received, first_row;  // of each rank
  std::int64_t rows = 0;
  for (const auto& its : all_gather_numbers(counts, group)) {
    received_.push_back(its[group.rank()]);
    lines_received.push_back(its[ranks + group.rank()]);
    first_row.insert(first_row.end(), lines_received.back(), rows);
    rows += received_.back();
  }
  const auto visits = all_to_all_rows(sent_visits, lines_sent, lines_received, group);  // [M, 2]
  lines_ = {.rows = visits.select(1, 0) + at::tensor(first_row, kLong).to(visits.device()),
            .experts = visits.select(1, 1),
            .weights = all_to_all_rows(weight.index_select(0, order), lines_sent, lines_received, group)};
}

Tensor ExpertExchange::dispatch(const Tensor& x) const {
  if (group_.size() == 1) return x;
  return all_to_all_rows(x.index_select(0, sent_tokens_), sent_, received_, group_);
}

Tensor ExpertExchange::combine(const Tensor& y) const {
  if (group_.size() == 1) return y;
  const auto back = all_to_all_rows(y, received_, sent_, group_);
  return at::zeros({tokens_, y.size(1)}, y.options()).index_add(0, sent_tokens_, back);
}

}  // namespace sluice
