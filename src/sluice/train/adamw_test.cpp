// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/adamw.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

Parameter parameter(const std::string& name, at::IntArrayRef shape, at::ScalarType type, bool decay) {
  Parameter made{.name = name, .shape = shape.vec(), .dtype = {}, .decay = decay, .init = {}, .value = {}};
  made.value = at::ones(shape, at::TensorOptions().dtype(type)).requires_grad_();
  return made;
}

void give_gradient(Parameter& parameter, double value) {
  parameter.value.mutable_grad() = at::full_like(parameter.value.detach(), value);
}

Tensor scale(double factor) { return at::scalar_tensor(factor, at::TensorOptions().dtype(kDouble)); }

TEST(AdamW, FollowsItsFormula) {
  at::manual_seed(1);
  auto p = parameter("w", {5, 7}, kFloat, true);
  GradientSum gradients({&p});
  AdamW optimizer({&p}, {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1});
  auto w = p.value.detach().to(kDouble).clone(), m = at::zeros_like(w), v = at::zeros_like(w);
  for (int step = 1; step <= 5; ++step) {
    const auto g = at::randn({5, 7});
    p.value.mutable_grad() = g.clone();
    gradients.take();
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
  give_gradient(plain, 1);
  give_gradient(faster, 1);
  gradients.take();
  optimizer.step(gradients, 0.01, scale(1));
  // The first update is of size lr, and decay takes lr * 0.1 of a value of 1.
  EXPECT_NEAR(plain.value[0][0].item<double>(), 1 - 0.01 - 0.001, 1e-6);
  EXPECT_NEAR(faster.value[0][0].item<double>(), 1 - 0.03 - 0.003, 1e-6);
}

TEST(AdamW, AScaleThatIsNoNumberChangesNothing) {
  auto p = parameter("w", {3}, kFloat, true);
  GradientSum gradients({&p});
  AdamW optimizer({&p}, {.weight_decay = 0.1});
  give_gradient(p, 1);
  gradients.take();
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
    give_gradient(a_log, 1);
    give_gradient(held_in_bf16, 1);
    gradients.take();
    optimizer.step(gradients, 1e-4, scale(1));
    gradients.clear();
  }
  EXPECT_NEAR(a_log.value[0].item<double>(), 0.998, 1e-5);
  EXPECT_NEAR(assemble(optimizer.state()["master"][1])[0].item<double>(), 0.998, 1e-5);
  EXPECT_EQ(held_in_bf16.value[0].item<double>(), 0.99609375);  // the nearest bfloat16 to 0.998
}

TEST(GradientSum, AddsMicroBatchesInFloat32) {
  auto p = parameter("w", {2}, kBFloat16, true);
  GradientSum gradients({&p});
  for (int i = 0; i < 256; ++i) {
    give_gradient(p, i == 0 ? 256 : 1);
    gradients.take();
  }
  EXPECT_EQ(gradients.of(0)[0].item<double>(), 256 + 255);  // a bfloat16 sum would stay at 256
  EXPECT_FALSE(p.value.grad().defined());
}

TEST(GradientSum, NormCoversAllParameters) {
  auto a = parameter("a", {1}, kFloat, true), b = parameter("b", {2}, kFloat, true),
       untouched = parameter("c", {9}, kFloat, true);
  GradientSum gradients({&a, &b, &untouched});
  a.value.mutable_grad() = at::tensor({12.f});
  b.value.mutable_grad() = at::tensor({3.f, 4.f});
  gradients.take();
  EXPECT_DOUBLE_EQ(gradients.norm().item<double>(), 13);
  EXPECT_EQ(gradients.first_not_finite(), "");
  b.value.mutable_grad() = at::tensor({0.f, INFINITY});
  gradients.take();
  EXPECT_EQ(gradients.first_not_finite(), "b");
}

}  // namespace
}  // namespace sluice
