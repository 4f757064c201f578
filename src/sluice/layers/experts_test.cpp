// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/experts.h"

#include <gtest/gtest.h>

#include "sluice/kernels/common/testing.h"
#include "sluice/layers/choices.h"
#include "sluice/layers/mesh_testing.h"
#include "sluice/layers/recompute.h"

namespace sluice {
namespace {

Routing route(const TopKRouter& router, const Tensor& x) {
  const auto pack = make_pack({x.size(0)});
  return router.forward(x, {.pack = pack, .rotary = {}});
}

constexpr std::int64_t kHidden = 12;

SparseMoeSizes sizes(std::int64_t experts, std::int64_t top_k, bool norm = true) {
  return {.hidden_size = kHidden,
          .num_experts = experts,
          .num_experts_per_tok = top_k,
          .moe_intermediate_size = 5,
          .shared_expert_intermediate_size = 7,
          .norm_topk_prob = norm,
          .initializer_range = 0.5};
}

// A router whose logits for the one-hot token t are row t of `logits` [T, E], T <= kHidden.
Routing route(const Tensor& logits, std::int64_t top_k, bool norm = true, at::ScalarType dtype = kFloat) {
  TopKRouter router(sizes(logits.size(1), top_k, norm));
  router.parameters()[0]->value = at::constant_pad_nd(logits.t(), {0, kHidden - logits.size(0)}).to(dtype);
  return route(router, at::eye(kHidden, at::TensorOptions().dtype(dtype)).narrow(0, 0, logits.size(0)));
}

Tensor ids(const std::vector<std::int64_t>& values) { return at::tensor(values); }

struct Moe {
  SparseMoe block;
  std::vector<Parameter*> parameters = block.parameters();
  explicit Moe(const SparseMoeSizes& s, at::ScalarType dtype = kFloat) : block(s) { initialize(parameters, dtype, 3); }

  Tensor weight(const std::string& name) const {
    for (const auto* parameter : parameters) {
      if (parameter->name == name) return parameter->value;
    }
    throw std::out_of_range(name);
  }

  Tensor forward(const Tensor& x, RouterLoad* load = nullptr) const {
    const auto pack = make_pack({x.size(0)});
    return block.forward(x, {.pack = pack, .rotary = {}, .router_load = load});
  }
};

TEST(TopKRouter, TakesTheSoftmaxOverAllExpertsThenTheLargest) {
  const auto logits = at::tensor({0.F, 2.F, -1.F, 1.F, 3.F, 1.5F}).unsqueeze(0);
  const auto probabilities = logits.to(kDouble).softmax(1)[0];
  const auto plain = route(logits, 3, /*norm=*/false), normed = route(logits, 3, /*norm=*/true);
  EXPECT_TRUE(plain.experts[0].equal(ids({4, 1, 5})));
  const auto chosen = probabilities.index_select(0, ids({4, 1, 5}));
  EXPECT_LT(relative_error(plain.weights[0], chosen), 1e-6);
  EXPECT_LT(relative_error(normed.weights[0], chosen / chosen.sum()), 1e-6);
  EXPECT_TRUE(plain.visits.equal(ids({0, 1, 0, 0, 1, 1})));
}

TEST(TopKRouter, OfEquallyLikelyExpertsTheLowerIndexGoesFirst) {
  const auto tied = at::zeros({2, 512});
  tied[1][7] = 1;
  const auto routing = route(tied, 10);
  EXPECT_TRUE(routing.experts[0].equal(at::arange(10)));
  EXPECT_TRUE(routing.experts[1].equal(ids({7, 0, 1, 2, 3, 4, 5, 6, 8, 9})));
}

// The probabilities of 512 experts whose logits are 0.001 apart are equal in bfloat16, and their logits nearly.
TEST(TopKRouter, TellsExpertsApartThatBfloat16DoesNot) {
  const auto logits = (at::arange(512, at::TensorOptions().dtype(kFloat)) * 0.001).unsqueeze(0);
  const auto routing = route(logits, 10);
  EXPECT_TRUE(routing.experts[0].equal(ids({511, 510, 509, 508, 507, 506, 505, 504, 503, 502})));
  EXPECT_NEAR(routing.weights.sum().item<double>(), 1, 1e-6);
  // Activations and weights of bfloat16, logits 256 and 256.5 between which it has no number.
  const auto close = at::tensor({256.F, 256.5F}).unsqueeze(0);
  TopKRouter router(sizes(2, 1));
  const auto w = at::zeros({2, kHidden}, at::TensorOptions().dtype(kBFloat16));
  w.select(1, 0).fill_(256);
  w[1][1] = 0.5;
  router.parameters()[0]->value = w;
  const auto x = at::zeros({1, kHidden}, w.options());
  x.narrow(1, 0, 2).fill_(1);
  EXPECT_EQ(route(router, x).experts.item<std::int64_t>(), 1);
}

TEST(TopKRouter, OneExpertWithoutRenormalisationStillTeachesTheRouter) {
  TopKRouter router(sizes(4, 1, /*norm=*/false));
  initialize(router.parameters(), kFloat, 1);
  auto& weight = router.parameters()[0]->value.requires_grad_();
  route(router, at::ones({3, kHidden})).weights.sum().backward();
  EXPECT_GT(weight.grad().abs().sum().item<double>(), 0);
}

// The block written out token by token in float64. Float32 sums of 12 terms, twice, and a softmax: 1e-6.
TEST(SparseMoe, IsTheWeightedSumOfItsExpertsAndTheGatedSharedOne) {
  at::manual_seed(1);
  const Moe moe(sizes(6, 2));
  const auto x = at::randn({9, kHidden});
  const auto f64 = [&](const std::string& name) { return moe.weight(name).to(kDouble); };
  const auto swiglu = [](const Tensor& token, const Tensor& gate, const Tensor& up, const Tensor& down) {
    return at::linear(at::silu(at::linear(token, gate)) * at::linear(token, up), down);
  };
  std::vector<Tensor> rows;
  for (std::int64_t t = 0; t < 9; ++t) {
    const auto token = x[t].to(kDouble);
    const auto [top, experts] = at::linear(token, f64("gate.weight")).softmax(0).topk(2);
    auto y = at::sigmoid(at::linear(token, f64("shared_expert_gate.weight"))) *
             swiglu(token, f64("shared_expert.gate_proj.weight"), f64("shared_expert.up_proj.weight"),
                    f64("shared_expert.down_proj.weight"));
    for (int j = 0; j < 2; ++j) {
      const auto e = experts[j].item<std::int64_t>();
      const auto gate_up = f64("experts.gate_up_proj")[e];
      y = y + top[j] / top.sum() *
                  swiglu(token, gate_up.narrow(0, 0, 5), gate_up.narrow(0, 5, 5), f64("experts.down_proj")[e]);
    }
    rows.push_back(y);
  }
  EXPECT_LT(relative_error(moe.forward(x), at::stack(rows)), 1e-6);
}

TEST(SparseMoe, ExpertsThatNoTokenGoesToGetGradientsOfExactlyZero) {
  const Moe moe(sizes(16, 2));
  at::manual_seed(2);
  const auto x = at::randn({3, kHidden});
  for (auto* parameter : moe.parameters) parameter->value.requires_grad_();
  RouterLoad load;
  moe.forward(x, &load).square().sum().backward();
  for (const auto* name : {"experts.gate_up_proj", "experts.down_proj"}) {
    const auto per_expert = moe.weight(name).grad().abs().sum({1, 2});
    EXPECT_TRUE(per_expert.gt(0).equal(load.visits.gt(0))) << name;
  }
  EXPECT_GT(load.visits.eq(0).sum().item<std::int64_t>(), 0);
}

TEST(SparseMoe, FrozenExpertsLeaveTheRestOfTheGradientsAsTheyAre) {
  at::manual_seed(3);
  const auto x = at::randn({5, kHidden});
  std::vector<Tensor> gradients;
  for (const bool frozen : {false, true}) {
    const Moe moe(sizes(4, 2));
    for (auto* parameter : moe.parameters) {
      parameter->value.requires_grad_(!frozen || parameter->name.find("experts.") == std::string::npos);
    }
    moe.forward(x).square().sum().backward();
    gradients.push_back(moe.weight("gate.weight").grad());
    EXPECT_EQ(moe.weight("experts.down_proj").grad().defined(), !frozen);
  }
  EXPECT_TRUE(gradients[0].equal(gradients[1]));
}

TEST(LoadBalancingLoss, IsKWhenTheExpertsAreEvenlyUsed) {
  const auto even = at::full({8}, 1 / 8.);
  RouterLoad load;
  for (const int rows : {4, 12}) {  // two layers of different weight
    load.add({.rows = rows, .visits = at::full({8}, 2 * rows / 8.), .probability = even * rows});
  }
  EXPECT_NEAR(load_balancing_loss(load).item<double>(), 2, 1e-6);
}

// Pooled: E sum_e (visits of both layers / rows of both) (probability of both / rows of both), not a mean of two
// losses.
TEST(LoadBalancingLoss, IsOneProductOverThePooledLayersAndItsVisitsHaveNoGradient) {
  const Moe first(sizes(4, 2)), second(sizes(4, 2, false));
  at::manual_seed(4);
  const auto x = at::randn({7, kHidden}), y = at::randn({5, kHidden});
  for (auto* parameter : first.parameters) parameter->value.requires_grad_();
  RouterLoad load;
  first.forward(x, &load);
  second.forward(y, &load);
  const auto loss = load_balancing_loss(load);
  loss.backward();

  const auto leaf = first.weight("gate.weight").detach().to(kDouble).requires_grad_();
  const auto p = at::cat({at::linear(x.to(kDouble), leaf).softmax(1),
                          at::linear(y.to(kDouble), second.weight("gate.weight").to(kDouble)).softmax(1)});
  const auto chosen = std::get<1>(p.topk(2, 1));
  const auto visits = at::bincount(chosen.flatten(), std::nullopt, 4).to(kDouble);
  const auto want = 4 * (visits / 12 * p.mean(0)).sum();
  want.backward();
  EXPECT_EQ(load.rows, 12);
  EXPECT_NEAR(loss.item<double>(), want.item<double>(), 1e-6);
  EXPECT_LT(relative_error(first.weight("gate.weight").grad(), leaf.grad()), 1e-5);
}

TEST(Recompute, OfASparseBlockGivesTheSameBitsAndTheSameRouterGradient) {
  at::manual_seed(5);
  const auto x = at::randn({6, kHidden});
  std::vector<std::vector<Tensor>> results;
  for (const bool again : {false, true}) {
    const Moe moe(sizes(4, 2));
    std::vector<Tensor> values;
    for (auto* parameter : moe.parameters) values.push_back(parameter->value.requires_grad_());
    const Recomputed run = [&](const Tensor& input) {
      RouterLoad load;
      const auto out = moe.forward(input, &load);
      return std::vector<Tensor>{out, load.visits, load.probability};
    };
    const auto leaf = x.clone().requires_grad_();
    const auto outputs = again ? recompute(run, leaf, values) : run(leaf);
    const auto loss = load_balancing_loss({.rows = 6, .visits = outputs[1], .probability = outputs[2]});
    (outputs[0].square().sum() + 10 * loss).backward();
    results.push_back({outputs[0].detach(), loss.detach(), leaf.grad()});
    for (const auto& value : values) results.back().push_back(value.grad());
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[0][i].equal(results[1][i])) << i;
}

// Each token goes its own way, so it does not matter how many go together, but for the rounding of products of other
// heights: the router's are float32, a few of its roundings of 6e-8.
TEST(SparseMoe, TokensInPartsAreTheSameAsAllAtOnce) {
  const Moe moe(sizes(8, 3), kDouble);
  const auto x = at::randn({23, kHidden}, kDouble);
  const auto pack = make_pack({23});
  RouterLoad all, parts;
  const auto at_once = moe.block.forward_in_parts(x, {.pack = pack, .rotary = {}, .router_load = &all});
  for (const std::int64_t most : {1, 7, 22, 23, 24}) {
    parts = {};
    const auto in_parts =
        moe.block.forward_in_parts(x, {.pack = pack, .rotary = {}, .router_load = &parts, .feed_forward_tokens = most});
    EXPECT_LT(relative_error(in_parts, at_once), 1e-6) << most;
    EXPECT_EQ(parts.rows, 23);
    EXPECT_TRUE(parts.visits.equal(all.visits));
    ChoiceRecord record;  // kept part by part, and taken so
    const auto forward = [&] {
      return moe.block.forward_in_parts(
          x, {.pack = pack, .rotary = {}, .feed_forward_tokens = most, .replay = {.experts = &record}});
    };
    forward();
    EXPECT_EQ(record.kept().chosen.size(0), 23);
    record = ChoiceRecord(record.kept());
    EXPECT_TRUE(forward().equal(in_parts));
    EXPECT_EQ(record.rows(), 23);
    EXPECT_EQ(record.differing(), 0);
  }
}

LayerOnMesh sparse_moe() {
  return {.make = [] { return std::make_unique<SparseMoe>(sizes(8, 3)); },
          .forward =
              [](const Module& module, const Tensor& x, const ForwardContext& context) {
                return static_cast<const SparseMoe&>(module).forward(x, context);
              },
          .width = kHidden};
}

TEST(SparseMoe, ExpertsMayLieOnSeveralRanks) {
  constexpr double kBound = 1e-6;  // the router's softmax and the tokens' weights are float32
  expect_same_on_mesh(sparse_moe(), {23}, {.cp = 2, .ep = 2}, kBound);
  expect_same_on_mesh(sparse_moe(), {23}, {.cp = 4, .ep = 2}, kBound);
  expect_same_on_mesh(sparse_moe(), {23}, {.cp = 4, .ep = 4}, kBound);
  expect_same_on_mesh(sparse_moe(), {23}, {.cp = 2, .tp = 2, .ep = 2}, kBound);
  expect_same_on_mesh(sparse_moe(), {1}, {.cp = 2, .ep = 2}, kBound);  // a rank without tokens
}

TEST(RoutedExperts, ARankWhoseExpertsNobodyVisitsGetsGradientsOfZero) {
  run_ranks(2, [](const World& world) {
    const Mesh mesh(world, {.cp = 2, .ep = 2});
    const RoutedExperts experts(sizes(8, 2));
    mesh_testing::draw_parameters(experts.parameters(), place_of(mesh));
    const auto x = at::full({3, kHidden}, 1.0 + static_cast<double>(world.rank()), kDouble).requires_grad_();
    const auto weights = at::full({3, 2}, 0.5, kFloat).requires_grad_();
    const auto chosen = at::tensor({0, 3, 1, 2, 3, 0}, kLong).view({3, 2});
    const Routing routing{.experts = chosen, .weights = weights, .probabilities = {}, .visits = {}};
    experts.forward(x, routing, mesh.ep()).sum().backward();
    EXPECT_GT(x.grad().abs().min().item<double>(), 0);
    for (const auto* parameter : experts.parameters()) {
      const auto largest = parameter->value.grad().abs().amax({1, 2});  // of each expert
      EXPECT_EQ((largest == 0).all().item<bool>(), world.rank() == 1);
      EXPECT_EQ((largest > 0).all().item<bool>(), world.rank() == 0);
    }
  });
}

}  // namespace
}  // namespace sluice
