// SPDX-License-Identifier: Apache-2.0
// Mixture of experts (Shazeer et al. 2017) as Qwen3-Next and later have it: a router sends each token to k of E
// experts, and a shared expert behind a gate of its own sees every token.
//
// T tokens, D hidden size, E experts, k experts a token, I their intermediate size.
#pragma once

#include "sluice/layers/feed_forward.h"

namespace sluice {

struct SparseMoeSizes {
  std::int64_t hidden_size;
  std::int64_t num_experts, num_experts_per_tok, moe_intermediate_size;
  std::int64_t shared_expert_intermediate_size;
  bool norm_topk_prob;  // the weights of a token's experts are divided by their sum
  double initializer_range;
};

// Where each token goes.
struct Routing {
  Tensor experts;        // [T, k] int64, likeliest first; of equally likely ones the lower index
  Tensor weights;        // [T, k] float32
  Tensor probabilities;  // [T, E] float32: softmax of the router's logits
  Tensor visits;         // [E] int64: tokens that go to each expert
};

// softmax(W x) over all experts in float32, logits included; then the k largest; then, with norm_topk_prob, divided by
// their sum.
class TopKRouter : public Module {
 public:
  explicit TopKRouter(const SparseMoeSizes& sizes);
  Routing forward(const Tensor& x, const ForwardContext& context) const;  // x [T, D]

 private:
  std::int64_t top_k_;
  bool norm_topk_prob_;
  Parameter& weight_;  // [E, D]
};

// E SwiGLUs, of which each expert-parallel rank holds some. An expert that no token goes to costs nothing and gets
// gradients of exactly 0.
class RoutedExperts : public Module {
 public:
  explicit RoutedExperts(const SparseMoeSizes& sizes);
  Tensor forward(const Tensor& x, const Routing& routing, const Group& ranks) const;  // [T, D] to [T, D]: weighted sums

 private:
  Parameter& gate_up_proj_;  // [E, 2 I, D], rows of gate first; no ".weight" in their names
  Parameter& down_proj_;     // [E, D, I]
};

// routed(x) + sigmoid(gate x) shared(x).
class SparseMoe : public FeedForward {
 public:
  explicit SparseMoe(const SparseMoeSizes& sizes);
  Tensor forward(const Tensor& x, const ForwardContext& context) const override;
  std::string why_not_on_gpu() const override;
  void count_operations(double tokens, Operations& operations) const override;

 private:
  SparseMoeSizes sizes_;
  TopKRouter& gate_;
  RoutedExperts& experts_;
  SwiGlu& shared_expert_;
  Linear& shared_expert_gate_;  // [1, D]
};

// What the routers of one forward pass did, its sparse layers pooled (ForwardContext::router_load).
struct RouterLoad {
  std::int64_t rows = 0;  // tokens times layers
  Tensor visits;          // [E] float32: how often each expert was chosen; undefined without a sparse layer
  Tensor probability;     // [E] float32: the sum of its probabilities, with gradient
  void add(const RouterLoad& other);
};

// The auxiliary loss that keeps experts evenly used (Fedus et al. 2021), of the pooled layers: E sum_e f_e P_e with f_e
// the visits and P_e the probability of expert e, a row. Evenly used it is k. f_e has no gradient. `ranks` share the
// rows, at least one: each gets its part of the loss, and the parts add up to it.
Tensor load_balancing_loss(const RouterLoad& load, const Group& ranks = {});

}  // namespace sluice
