// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/experts.h"

#include "sluice/kernels/expert_matmul/expert_matmul.h"
#include "sluice/kernels/swiglu/swiglu.h"
#include "sluice/layers/choices.h"
#include "sluice/layers/expert_exchange.h"
#include "sluice/layers/lora.h"
#include "sluice/parallel/collectives.h"

namespace sluice {

TopKRouter::TopKRouter(const SparseMoeSizes& s)
    : top_k_(s.num_experts_per_tok),
      norm_topk_prob_(s.norm_topk_prob),
      weight_(declare(
          {.name = "weight", .shape = {s.num_experts, s.hidden_size}, .init = Init::normal(s.initializer_range)})) {}

Routing TopKRouter::forward(const Tensor& x, const ForwardContext& context) const {
  const auto logits = at::linear(x.to(kFloat), weight_.value.to(kFloat));  // in bfloat16 near experts would tie
  const auto probabilities = logits.softmax(1);
  // A stable sort keeps the lower of equal experts first; topk promises no order.
  const auto order = std::get<1>(probabilities.detach().sort(/*stable=*/true, 1, /*descending=*/true));
  auto experts = order.narrow(1, 0, top_k_).contiguous();
  if (auto* record = context.replay.experts; record != nullptr && record->takes()) {
    experts = record->follow(experts, at::scalar_tensor(weight_.shape[0], kLong), ChoiceOrder::kAny, context);
  } else if (record != nullptr) {
    record->keep(experts, context);
  }
  auto weights = probabilities.gather(1, experts);
  if (norm_topk_prob_) weights = weights / weights.sum(1, /*keepdim=*/true);
  return {.experts = experts,
          .weights = weights,
          .probabilities = probabilities,
          .visits = count_of_each(experts.flatten(), weight_.shape[0])};
}

RoutedExperts::RoutedExperts(const SparseMoeSizes& s)
    : gate_up_proj_(declare({.name = "gate_up_proj",
                             .shape = {s.num_experts, 2 * s.moe_intermediate_size, s.hidden_size},
                             .adaptable = true,
                             .split = Split::experts(s.num_experts),
                             .init = Init::normal(s.initializer_range)})),
      down_proj_(declare({.name = "down_proj",
                          .shape = {s.num_experts, s.hidden_size, s.moe_intermediate_size},
                          .adaptable = true,
                          .split = Split::experts(s.num_experts),
                          .init = Init::normal(s.initializer_range)})) {}

// A line is a token's visit to an expert; here lines are sorted by expert, and in it by token.
Tensor RoutedExperts::forward(const Tensor& tokens, const Routing& routing, const Group& ranks) const {
  const auto experts = gate_up_proj_.value.size(0);
  const ExpertExchange exchange(routing, experts, ranks);
  const auto& lines = exchange.lines();
  const auto x = exchange.dispatch(tokens);                                            // [R, D]
  const auto order = lines.experts.argsort(/*stable=*/true, 0, /*descending=*/false);  // [M]
  const auto row = lines.rows.index_select(0, order);                                  // [M]
  const auto offsets =
      at::constant_pad_nd(count_of_each(lines.experts, experts).cumsum(0), {1, 0}).to(kInt);  // [E + 1]
  const auto weights = lines.weights.index_select(0, order).to(x.scalar_type());              // [M]

  const auto spread = [&](const Tensor& from, const Tensor& weight) {  // rows to lines
    return expert_matmul(from, weight, offsets, row, std::nullopt, order.size(0));
  };
  const auto keep = [&](const Tensor& from, const Tensor& weight) {  // lines to lines
    return expert_matmul(from, weight, offsets, std::nullopt, std::nullopt, order.size(0));
  };
  const auto gather = [&](const Tensor& from, const Tensor& weight) {  // lines to the sums of rows
    return expert_matmul(from, weight, offsets, std::nullopt, row, x.size(0));
  };

  auto both = spread(x, gate_up_proj_.value);
  if (gate_up_proj_.adapter) both = gate_up_proj_.adapter->add_to(both, x, spread, keep);
  const auto gate_up = both.chunk(2, 1);
  // The weights enter before the down projection, which is linear: what leaves it need not be kept for their gradient.
  const auto hidden = swiglu(gate_up[0], gate_up[1]) * weights.unsqueeze(1);  // [T k, I]
  const auto y = gather(hidden, down_proj_.value);
  return exchange.combine(down_proj_.adapter ? down_proj_.adapter->add_to(y, hidden, keep, gather) : y);
}

SparseMoe::SparseMoe(const SparseMoeSizes& s)
    : sizes_(s),
      gate_(add("gate", std::make_unique<TopKRouter>(s))),
      experts_(add("experts", std::make_unique<RoutedExperts>(s))),
      shared_expert_(add("shared_expert", std::make_unique<SwiGlu>(s.hidden_size, s.shared_expert_intermediate_size,
                                                                   s.initializer_range))),
      shared_expert_gate_(add("shared_expert_gate", std::make_unique<Linear>(1, s.hidden_size, s.initializer_range))) {}

Tensor SparseMoe::forward(const Tensor& x, const ForwardContext& context) const {
  const auto routing = gate_.forward(x, context);
  if (context.router_load != nullptr) {
    context.router_load->add(
        {.rows = x.size(0), .visits = routing.visits.to(kFloat), .probability = routing.probabilities.sum(0)});
  }
  return experts_.forward(x, routing, context.mesh.ep()) +
         shared_expert_gate_.forward(x).sigmoid() * shared_expert_.forward(x, context);
}

std::string SparseMoe::why_not_on_gpu() const {
  if (sizes_.hidden_size % 8 == 0 && sizes_.moe_intermediate_size % 8 == 0) return "";
  return fmt::format("experts on a GPU take widths that are multiples of 8, and the model's are {} and {}",
                     sizes_.hidden_size, sizes_.moe_intermediate_size);
}

void SparseMoe::count_operations(double tokens, Operations& operations) const {
  const auto hidden = static_cast<double>(sizes_.hidden_size);
  const auto widths = static_cast<double>(sizes_.num_experts_per_tok * sizes_.moe_intermediate_size);
  operations["router"] += 2 * tokens * hidden * static_cast<double>(sizes_.num_experts);
  operations["experts"] += 2 * tokens * 3 * hidden * widths;
  shared_expert_.count_operations(tokens, operations);
  operations["feed-forward"] += shared_expert_gate_.operations(tokens);
}

void RouterLoad::add(const RouterLoad& other) {
  rows += other.rows;
  visits = visits.defined() ? visits + other.visits : other.visits;
  probability = probability.defined() ? probability + other.probability : other.probability;
}

Tensor load_balancing_loss(const RouterLoad& load, const Group& ranks) {
  double rows = 0;
  for (const auto& its : all_gather_numbers({load.rows}, ranks)) rows += static_cast<double>(its[0]);
  const auto experts = static_cast<double>(load.visits.size(0));
  const auto visits = all_reduce_sum(load.visits.detach(), ranks);
  return (visits * load.probability).sum() * (experts / (rows * rows));
}

}  // namespace sluice
