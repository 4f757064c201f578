// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/adamw.h"

#include <gtest/gtest.h>

#include "sluice/core/testing.h"

namespace sluice {
namespace {

Parameter parameter(const std::string& name, at::IntArrayRef shape, at::ScalarType type, bool decay) {
  Parameter made{.name = name, .shape = shape.vec(), .dtype = {}, .decay = decay, .init = {}, .value = {}};
  made.value = at::ones(shape, at::TensorOptions().dtype(type)).requires_grad_();
  return made;
}

// Whose gradient is `gradient` everywhere.
Tensor loss(const Parameter& parameter, double gradient) { return (parameter.value * gradient).sum(); }

Tensor scale(double factor) { return at::scalar_tensor(factor, at::TensorOptions().dtype(kDouble)); }

TEST(AdamW, FollowsItsFormula) {
  at::manual_seed(1);
  auto p = parameter("w", {5, 7}, kFloat, true);
  GradientSum gradients({&p});
  AdamW optimizer({&p}, {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1});
  auto w = p.value.detach().to(kDouble).clone(), m = at::zeros_like(w), v = at::zeros_like(w);
  for (int step = 1; step <= 5; ++step) {
    const auto g = at::randn({5, 7});
    gradients.add((p.value * g).sum(), /*last=*/true);
    optimizer.step(gradients, 0.01, scale(0.5));
    gradients.clear();
    const auto scaled = g.to(kDouble) * 0.5;
    m = 0.9 * m + 0.1 * scaled;
    v = 0.99 * v + 0.01 * scaled * scaled;
    w = w * (1 - 0.01 * 0.1) -
        0.01 * (m / (1 - std::pow(0.9, step))) / ((v / (1 - std::pow(0.99, step))).sqrt() + 1e-8);
  }
  // Five float32 updates of size lr on values near 1: a few roundings of 6e-8.
  EXPECT_LT((p.value.detach().to(kDouble) - w).abs().max().item<double>(), 1e-6);
}

TEST(AdamW, DecaysOnlyWhatDeclaresIt) {
  auto matrix = parameter("matrix", {4, 4}, kFloat, true), norm = parameter("norm", {4}, kFloat, false);
  GradientSum gradients({&matrix, &norm});  // none arrive: all zero
  AdamW optimizer({&matrix, &norm}, {.weight_decay = 0.1});
  for (int step = 0; step < 3; ++step) optimizer.step(gradients, 0.1, scale(1));
  EXPECT_NEAR(matrix.value[0][0].item<double>(), 0.99 * 0.99 * 0.99, 1e-6);
  EXPECT_EQ(norm.value[0].item<double>(), 1);
}

TEST(AdamW, AParameterMayHaveAnotherLearningRate) {
  auto plain = parameter("plain", {4, 4}, kFloat, true), faster = parameter("faster", {4, 4}, kFloat, true);
  GradientSum gradients({&plain, &faster});
  AdamW optimizer({&plain, &faster}, {.weight_decay = 0.1, .lr_ratios = {{"faster", 3}}});
  gradients.add(loss(plain, 1) + loss(faster, 1), /*last=*/true);
  optimizer.step(gradients, 0.01, scale(1));
  // The first update is of size lr, and decay takes lr * 0.1 of a value of 1.
  EXPECT_NEAR(plain.value[0][0].item<double>(), 1 - 0.01 - 0.001, 1e-6);
  EXPECT_NEAR(faster.value[0][0].item<double>(), 1 - 0.03 - 0.003, 1e-6);
}

TEST(AdamW, AScaleThatIsNoNumberChangesNothing) {
  auto p = parameter("w", {3}, kFloat, true);
  GradientSum gradients({&p});
  AdamW optimizer({&p}, {.weight_decay = 0.1});
  gradients.add(loss(p, 1), /*last=*/true);
  optimizer.step(gradients, 0.1, scale(NAN));
  EXPECT_TRUE(p.value.equal(at::ones({3})));
  EXPECT_EQ(assemble(optimizer.state()["exp_avg"][0]).abs().max().item<double>(), 0);
}

// Case L5: lr 1e-4 for 20 steps moves a float32 value by 0.002; in bfloat16 each step would round to nothing, which is
// why the master is float32 whatever the parameter is held in.
TEST(AdamW, SmallStepsAddUpInTheMaster) {
  auto a_log = parameter("A_log", {3}, kFloat, false), held_in_bf16 = parameter("w", {3}, kBFloat16, true);
  GradientSum gradients({&a_log, &held_in_bf16});
  AdamW optimizer({&a_log, &held_in_bf16}, {});
  for (int step = 0; step < 20; ++step) {
    gradients.add(loss(a_log, 1) + loss(held_in_bf16, 1), /*last=*/true);
    optimizer.step(gradients, 1e-4, scale(1));
    gradients.clear();
  }
  EXPECT_NEAR(a_log.value[0].item<double>(), 0.998, 1e-5);
  EXPECT_NEAR(assemble(optimizer.state()["master"][1])[0].item<double>(), 0.998, 1e-5);
  EXPECT_EQ(held_in_bf16.value[0].item<double>(), 0.99609375);  // the nearest bfloat16 to 0.998
}

// States elsewhere, brought part by part: the same bits after five steps, from a restored state too.
TEST(AdamW, StatesMayLieElsewhere) {
  const TemporaryFolder folder;
  struct Run {
    std::vector<Tensor> values;
    OptimizerState state;
  };
  const auto run = [&](const OffloadSettings& offload, const OptimizerState* from) {
    auto a = parameter("a", {7, 5}, kFloat, false), b = parameter("b", {9, 4}, kBFloat16, true),
         c = parameter("c", {3}, kBFloat16, true);
    const std::vector<Parameter*> parameters{&a, &b, &c};
    GradientSum gradients(parameters);
    AdamW optimizer(parameters, {.weight_decay = 0.1}, one_process(), offload);
    if (from != nullptr) optimizer.restore(*from, 2);
    at::manual_seed(3);
    for (int step = 0; step < 5; ++step) {
      auto sum = (a.value * at::randn({7, 5})).sum() + (b.value * at::randn({9, 4})).sum();
      if (step > 1) sum = sum + loss(c, 0.5);
      gradients.add(sum, /*last=*/true);
      optimizer.step(gradients, 0.01, scale(step == 3 ? NAN : 0.5));
      gradients.clear();
    }
    Run done{{a.value, b.value, c.value}, optimizer.state()};
    for (auto& [kind, tensors] : done.state) {
      for (auto& tensor : tensors) {
        for (auto& part : tensor.parts) part.values = part.values.clone();
      }
    }
    return done;
  };
  const auto expect_same = [](const Run& got, const Run& want) {
    for (std::size_t i = 0; i < want.values.size(); ++i) EXPECT_TRUE(got.values[i].equal(want.values[i])) << i;
    for (const auto& [kind, tensors] : want.state) {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(assemble(got.state.at(kind)[i]).equal(assemble(tensors[i]))) << kind << " of " << tensors[i].name;
      }
    }
  };
  const auto want = run({}, nullptr), went_on = run({}, &want.state);
  for (const auto where : {Offload::kHost, Offload::kDisk}) {
    for (const std::int64_t part_elements : {1, 11, 1000}) {
      const OffloadSettings offload{.where = where, .folder = folder.path(), .part_elements = part_elements};
      SCOPED_TRACE(fmt::format("offload {}, parts of {}", static_cast<int>(where), part_elements));
      expect_same(run(offload, nullptr), want);
      expect_same(run(offload, &want.state), went_on);
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace sluice
