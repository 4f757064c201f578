// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/layers/linear.h"

namespace sluice {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Two layers of two projections, and a table that takes no adapter.
class Model : public Module {
 public:
  Model() {
    add("embed", std::make_unique<Embedding>(7, 6, 1.));
    for (const auto* layer : {"layers.0", "layers.1"}) {
      for (const auto* name : {".q_proj", ".up_proj"}) {
        projections.push_back(&add(std::string(layer) + name, std::make_unique<Linear>(5, 6, 1.)));
      }
    }
    initialize(parameters(), kDouble, 1);
  }
  std::vector<Linear*> projections;
};

std::vector<std::string> adapted(const Model& model) {
  std::vector<std::string> names;
  for (const auto* parameter : model.parameters()) {
    if (parameter->adapter) names.push_back(module_name(*parameter));
  }
  return names;
}

// Of a rank that has `count` tokens, and its tensor ranks together `context_count`.
TokenSplit tokens_at(std::int64_t first, std::int64_t count, std::int64_t context_first, std::int64_t context_count) {
  TokenSplit tokens;
  tokens.first = first;
  tokens.count = count;
  tokens.context_first = context_first;
  tokens.context_count = context_count;
  return tokens;
}

TEST(Lora, AnAdaptedProjectionAddsItsProductAndBeginsAsItWas) {
  Model model;
  const auto& projection = *model.projections[0];
  const auto x = at::randn({9, 6}, at::kDouble), before = projection.forward(x);
  add_lora(model.parameters(), {.rank = 2, .alpha = 3, .targets = {"q_proj"}}, kDouble, 5);
  EXPECT_TRUE(projection.forward(x).equal(before));  // B is 0

  auto* parameter = model.parameters()[1];
  auto& [A, B, scale, dropout] = *parameter->adapter;
  EXPECT_EQ(A.name, "layers.0.q_proj.lora_A.weight");
  EXPECT_EQ(B.name, "layers.0.q_proj.lora_B.weight");
  EXPECT_DOUBLE_EQ(scale, 1.5);
  B.value = at::randn({5, 2}, at::kDouble);
  const auto merged = parameter->value + 1.5 * B.value.matmul(A.value);
  EXPECT_TRUE(at::allclose(projection.forward(x), x.matmul(merged.t()), 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(parameter->adapter->product().to(kDouble), merged - parameter->value, 1e-6, 1e-6));
}

TEST(Lora, OnlyAdaptersGetGradients) {
  Model model;
  add_lora(model.parameters(), {.rank = 2, .targets = {"all-linear"}}, kDouble, 5);
  const auto lora = lora_parameters(model.parameters());
  ASSERT_EQ(lora.size(), 8U);
  for (auto* parameter : lora) parameter->value.requires_grad_();
  for (const auto* parameter : model.parameters()) EXPECT_TRUE(parameter->frozen) << parameter->name;
  model.projections[1]->forward(at::randn({3, 6}, at::kDouble)).sum().backward();
  for (const auto* parameter : model.parameters()) EXPECT_FALSE(parameter->value.grad().defined()) << parameter->name;
  EXPECT_TRUE(lora[2]->value.grad().defined());
  EXPECT_TRUE(lora[3]->value.grad().defined());
}

TEST(Lora, TargetsAreEndsOfNamesWithWildcards) {
  const auto chosen = [](std::vector<std::string> targets) {
    Model model;
    add_lora(model.parameters(), {.targets = std::move(targets)}, kFloat, 1);
    return adapted(model);
  };
  EXPECT_THAT(chosen({"up_proj"}), ElementsAre("layers.0.up_proj", "layers.1.up_proj"));
  EXPECT_THAT(chosen({"layers.1.*"}), ElementsAre("layers.1.q_proj", "layers.1.up_proj"));
  EXPECT_THAT(chosen({"0.q_proj", "1.up_proj"}), ElementsAre("layers.0.q_proj", "layers.1.up_proj"));
  EXPECT_EQ(chosen({"all-linear"}).size(), 4U);
}

TEST(Lora, ATargetThatNamesNothingIsRefusedWithWhatThereIs) {
  Model model;
  for (const auto* target : {"linear_fc1x", "proj", "embed", ""}) {
    EXPECT_THAT(
        [&] {
          add_lora(model.parameters(), {.targets = {"q_proj", target}}, kFloat, 1);
        },
        ThrowsMessage<Error>(HasSubstr("this model has: all-linear, q_proj, up_proj")))
        << target;
  }
}

TEST(Lora, DropoutFollowsThePassAndKeepsTheMean) {
  Model model;
  add_lora(model.parameters(), {.rank = 2, .targets = {"q_proj"}}, kDouble, 5);
  const auto dropout = share_dropout(model.parameters(), 0.25, 5);
  auto& adapter = *model.parameters()[1]->adapter;
  adapter.A.value = at::ones({2, 6}, at::kDouble);
  adapter.B.value = at::ones({5, 2}, at::kDouble);
  const auto& projection = *model.projections[0];
  const auto x = at::ones({4000, 6}, at::kDouble), plain = projection.forward(x);
  dropout->tokens = tokens_at(0, 4000, 0, 4000);
  const auto pass = [&](std::uint64_t number) {
    dropout->pass = number;
    return projection.forward(x);
  };
  const auto first = pass(1);
  EXPECT_TRUE(first.equal(pass(1)));
  EXPECT_FALSE(first.equal(pass(2)));
  EXPECT_FALSE(first.equal(plain));
  // 24,000 draws of mean 1 and variance 1/3: the mean of their sums is within 5 deviations of 0.0037 of its own.
  EXPECT_NEAR(((first - plain).mean() / (adapter.scale * 12)).item<double>(), 0, 5 * 0.0038);
  dropout->pass.reset();
  EXPECT_TRUE(projection.forward(x).equal(plain));
}

// A rank that has some of the tokens and columns drops what one process drops of them.
TEST(Lora, EveryLayoutDropsTheSame) {
  const auto x = at::randn({30, 6}, kDouble), A = at::randn({2, 6}, kDouble), B = at::randn({5, 2}, kDouble);
  const auto project = [&](const MeshPlace& place, const TokenSplit& tokens, const Tensor& own) {
    const Linear linear(5, 6, 1, Split::anywhere(1));
    auto& weight = *linear.parameters()[0];
    add_lora({&weight}, {.rank = 2, .targets = {"weight"}}, kDouble, 5);
    weight.value = at::zeros(local_shape(weight, place), kDouble);
    weight.adapter->A.value = take_piece(A, weight.adapter->A, place);
    weight.adapter->B.value = B;
    const auto dropout = share_dropout({&weight}, 0.5, 5, place);
    dropout->pass = 3;
    dropout->tokens = tokens;
    return linear.forward(own);
  };
  const auto want = project({}, tokens_at(0, 30, 0, 30), x);
  const auto second_half = tokens_at(22, 8, 15, 15);
  auto sum = at::zeros({15, 5}, kDouble);
  for (const std::int64_t rank : {0, 1}) {
    sum += project({.tensor = {rank, 2}}, second_half, x.narrow(0, 15, 15).narrow(1, 3 * rank, 3));
  }
  const auto bound = 1e-14 * want.abs().max().item<double>();  // sums of a few products in float64
  EXPECT_LT((sum - want.narrow(0, 15, 15)).abs().max().item<double>(), bound);
  const auto own = project({}, second_half, x.narrow(0, 22, 8));
  EXPECT_LT((own - want.narrow(0, 22, 8)).abs().max().item<double>(), bound);
}

TEST(Lora, AnAdapterOfAnotherShapeIsRefused) {
  Model model;
  EXPECT_THAT(
      [&] {
        set_adapter(*model.parameters()[1], at::ones({2, 6}), at::ones({6, 2}), 1);
      },
      ThrowsMessage<Error>(HasSubstr("layers.0.q_proj.weight: an adapter of rank 2 is A [2, 6] and B [5, 2]")));
}

}  // namespace
}  // namespace sluice
