// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/linear_cross_entropy/cases.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {
namespace {

struct Problem {
  std::vector<Tensor> inputs;   // hidden, weight (float64)
  std::vector<Tensor> weights;  // of nll, predicted (none) and entropy in the loss
  Tensor targets;
};

Problem draw(const LinearCrossEntropyCase& c) {
  const auto f64 = at::TensorOptions().dtype(kDouble);
  Problem p;
  p.inputs = {at::randn({c.tokens, c.hidden}, f64) * c.logit_scale,
              at::randn({c.vocabulary, c.hidden}, f64) / std::sqrt(static_cast<double>(c.hidden))};
  p.weights = {at::randn({c.tokens}, f64), Tensor(), at::randn({c.tokens}, f64)};
  p.targets = at::randint(c.vocabulary, {c.tokens}, at::TensorOptions().dtype(kLong));
  p.targets.masked_fill_(at::rand({c.tokens}, f64) < c.ignored, -100);
  return p;
}

Operator entry(const Problem& p, decltype(linear_cross_entropy)& function, double logit_scale = 1) {
  return [&p, &function, logit_scale](const std::vector<Tensor>& x) {
    const auto result = function(x[0], x[1], p.targets, logit_scale, /*entropy=*/true);
    return std::vector<Tensor>{result.nll, result.predicted, result.entropy};
  };
}

struct Bounds {
  double nll, entropy, gradients;
};

void expect_equal_to_definition(const Problem& p, at::ScalarType type, const Bounds& bounds, double logit_scale) {
  SCOPED_TRACE(p.weights[0].defined() ? "nll and entropy" : "entropy alone");
  const auto inputs = to_type(p.inputs, type);
  const auto got = differentiate(entry(p, linear_cross_entropy, logit_scale), inputs, p.weights);
  const auto want =
      differentiate(entry(p, linear_cross_entropy_definition, logit_scale), to_type(inputs, kDouble), p.weights);
  EXPECT_EQ(got.outputs[0].scalar_type(), type == kDouble ? kDouble : kFloat);
  EXPECT_LT(relative_error(got.outputs[0], want.outputs[0]), bounds.nll);
  EXPECT_LT(relative_error(got.outputs[2], want.outputs[2]), bounds.entropy);
  EXPECT_LT(relative_error(got.gradients[0], want.gradients[0]), bounds.gradients) << "gradient of hidden";
  EXPECT_LT(relative_error(got.gradients[1], want.gradients[1]), bounds.gradients) << "gradient of weight";
  // The largest logits of a token may be closer than their rounding: then either is right.
  const auto logits = inputs[0].to(kDouble).mm(inputs[1].to(kDouble).t());
  const auto ignored = p.targets == -100;
  EXPECT_TRUE(got.outputs[1].eq(-100).equal(ignored));
  const auto picked = logits.gather(1, got.outputs[1].masked_fill(ignored, 0).unsqueeze(1)).squeeze(1);
  const auto behind = (logits.amax(1) - picked).masked_fill(ignored, 0);
  EXPECT_LE(behind.max().item<double>(), type == kDouble ? 0 : 1e-5 * logits.abs().max().item<double>());
}

TEST(LinearCrossEntropy, MatchesItsDefinitionInFloat64) {
  for (const auto& c : linear_cross_entropy_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    auto p = draw(c);
    expect_equal_to_definition(p, kDouble, {1e-12, 1e-12, 1e-12}, /*logit_scale=*/1);
    expect_equal_to_definition(draw(c), kDouble, {1e-12, 1e-12, 1e-12}, /*logit_scale=*/1 / 0.7);
    if (c.vocabulary == 1) continue;  // the entropy is 0, whatever the logit
    p.weights[0] = Tensor();
    expect_equal_to_definition(p, kDouble, {1e-12, 1e-12, 1e-11}, /*logit_scale=*/1 / 0.7);
  }
}

// A logit of size 100 is rounded to 4e-6, an error of that size in nll, which is itself about 100 there; exp and the
// sums of 30,000 terms add 1e-6. Probabilities, and with them gradients and entropy, inherit the absolute error of
// their logit.
TEST(LinearCrossEntropy, MatchesItsDefinitionInFloat32) {
  for (const auto& c : linear_cross_entropy_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(2);
    expect_equal_to_definition(draw(c), kFloat, {2e-6, 2e-5, 2e-5}, /*logit_scale=*/1);
    expect_equal_to_definition(draw(c), kFloat, {2e-6, 2e-5, 2e-5}, /*logit_scale=*/0.5);
  }
}

// bfloat16 operands give float32 logits, so nll is as good as in float32. The gradient of the logits is rounded once
// for the products with it, and their result once more: 2^-9 = 2e-3 each at most.
TEST(LinearCrossEntropy, MatchesItsDefinitionInBfloat16) {
  for (const auto& c : linear_cross_entropy_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(3);
    expect_equal_to_definition(draw(c), kBFloat16, {2e-6, 2e-5, 5e-3}, /*logit_scale=*/1);
    expect_equal_to_definition(draw(c), kBFloat16, {2e-6, 2e-5, 5e-3}, /*logit_scale=*/0.5);
  }
}

// Targets that are rows of another part of the vocabulary.
TEST(LinearCrossEntropy, MatchesItsDefinitionWithTargetsElsewhere) {
  at::manual_seed(6);
  auto p = draw({"elsewhere", 70, 16, 301, 0.2});
  p.targets.masked_fill_((at::rand({70}) < 0.5).logical_and(p.targets >= 0), -1);
  expect_equal_to_definition(p, kDouble, {1e-12, 1e-12, 1e-12}, /*logit_scale=*/1);
  expect_equal_to_definition(p, kFloat, {2e-6, 2e-5, 2e-5}, /*logit_scale=*/0.5);
}

TEST(LinearCrossEntropy, PartsOfTheVocabularyJoinToTheWhole) {
  at::manual_seed(7);
  const auto p = draw({"whole", 50, 16, 301, 0.2});
  const auto whole = linear_cross_entropy(p.inputs[0], p.inputs[1], p.targets);
  const auto gradients = linear_cross_entropy_backward(p.weights[0], p.inputs[0], p.inputs[1], p.targets, whole.lse);
  std::vector<Tensor> lse, target_logit, weight_gradients;
  auto hidden_gradient = at::zeros_like(p.inputs[0]);
  std::int64_t first = 0;
  for (const auto& part : p.inputs[1].split_with_sizes({100, 201})) {
    const auto own = (p.targets >= first).logical_and(p.targets < first + part.size(0));
    const auto targets = at::where(own, p.targets - first, p.targets.clamp_max(-1));
    const auto output = linear_cross_entropy(p.inputs[0], part, targets);
    lse.push_back(output.lse);
    target_logit.push_back(output.lse - output.nll);
    const auto both = linear_cross_entropy_backward(p.weights[0], p.inputs[0], part, targets, whole.lse);
    hidden_gradient += both.hidden;
    weight_gradients.push_back(both.weight);
    first += part.size(0);
  }
  const auto joined = at::stack(lse).logsumexp(0) - at::stack(target_logit).sum(0);
  EXPECT_LT(relative_error(joined.masked_fill(p.targets == -100, 0), whole.nll), 1e-12);
  EXPECT_LT(relative_error(hidden_gradient, gradients.hidden), 1e-12);
  EXPECT_LT(relative_error(at::cat(weight_gradients), gradients.weight), 1e-12);
}

TEST(LinearCrossEntropy, WithoutACountedTokenEverythingIsExactlyZero) {
  at::manual_seed(4);
  for (const auto type : {kFloat, kBFloat16}) {
    for (const std::int64_t tokens : {0, 7}) {
      auto p = draw({"ignored", tokens, 8, 50, 1});
      p.targets.fill_(-100);
      const auto got = differentiate(entry(p, linear_cross_entropy), to_type(p.inputs, type), p.weights);
      EXPECT_TRUE(got.outputs[0].equal(at::zeros({tokens})));
      EXPECT_TRUE(got.outputs[1].equal(at::full({tokens}, -100, at::TensorOptions().dtype(kLong))));
      EXPECT_EQ(got.gradients[0].count_nonzero().item<std::int64_t>(), 0);
      EXPECT_EQ(got.gradients[1].count_nonzero().item<std::int64_t>(), 0);
    }
  }
}

// What an ignored row holds does not matter, not even NaN, and its gradient is 0.
TEST(LinearCrossEntropy, IgnoredTokensCountForNothing) {
  at::manual_seed(5);
  const auto p = draw({"ignored", 60, 16, 300, 0.4});
  auto inputs = to_type(p.inputs, kFloat);
  const auto clean = differentiate(entry(p, linear_cross_entropy), inputs, p.weights);
  const auto ignored = p.targets.eq(-100).unsqueeze(1);
  inputs[0] = inputs[0].masked_fill(ignored, std::numeric_limits<double>::quiet_NaN());
  const auto dirty = differentiate(entry(p, linear_cross_entropy), inputs, p.weights);
  for (const int i : {0, 1}) {
    EXPECT_TRUE(dirty.outputs[i].equal(clean.outputs[i]));
    EXPECT_TRUE(dirty.gradients[i].equal(clean.gradients[i]));
  }
  EXPECT_EQ(dirty.gradients[0].masked_select(ignored).count_nonzero().item<std::int64_t>(), 0);
}

// Sizes past one tile in both directions: the last row's nll, gradient and prediction are those of the row alone.
TEST(LinearCrossEntropy, ARowDoesNotDependOnTheOthers) {
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(6);
    const auto p = draw({"rows", 2500, 32, 9000});
    const auto inputs = to_type(p.inputs, type);
    const auto all = differentiate(entry(p, linear_cross_entropy), inputs, p.weights);
    Problem last = p;
    last.targets = p.targets.narrow(0, 2499, 1);
    const auto one = differentiate(entry(last, linear_cross_entropy), {inputs[0].narrow(0, 2499, 1), inputs[1]},
                                   {p.weights[0].narrow(0, 2499, 1), Tensor(), p.weights[2].narrow(0, 2499, 1)});
    // Other tiles, another order of the float32 sums, of up to 9000 terms, which may differ by sqrt(9000) 2^-24 of
    // their norm; the gradient in bfloat16 is rounded to 2^-9 at last.
    EXPECT_LT(relative_error(one.outputs[0], all.outputs[0].narrow(0, 2499, 1)), 1e-6);
    EXPECT_TRUE(one.outputs[1].equal(all.outputs[1].narrow(0, 2499, 1)));
    EXPECT_LT(relative_error(one.gradients[0], all.gradients[0].narrow(0, 2499, 1)), type == kFloat ? 5.7e-6 : 4e-3);
  }
}

TEST(LinearCrossEntropy, TheGradientOfNllAloneIsTheSameWhetherEntropyIsAskedForOrNot) {
  at::manual_seed(10);
  const auto p = draw({"alone", 60, 16, 300, 0.4});
  const Operator plain = [&p](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{linear_cross_entropy(x[0], x[1], p.targets).nll};
  };
  const auto with = differentiate(entry(p, linear_cross_entropy), to_type(p.inputs, kFloat), {p.weights[0]}),
             without = differentiate(plain, to_type(p.inputs, kFloat), {p.weights[0]});
  for (const int i : {0, 1}) EXPECT_TRUE(with.gradients[i].equal(without.gradients[i]));
}

// A step along its gradient raises the entropy of a peaked distribution, and leaves that of equal logits as it is.
TEST(LinearCrossEntropy, EntropyRisesAlongItsGradient) {
  at::manual_seed(11);
  const auto targets = at::zeros({4}, kLong);
  const auto entropy_of = [&](const Tensor& hidden, const Tensor& head) {
    return linear_cross_entropy(hidden, head, targets, /*logit_scale=*/2, /*entropy=*/true).entropy;
  };
  const auto hidden = at::randn({4, 8}).requires_grad_(), head = at::randn({500, 8});
  const auto before = entropy_of(hidden, head);
  before.sum().backward();
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(entropy_of(hidden + 0.01 * hidden.grad(), head).gt(before).all().item<bool>());
  const auto flat = at::ones({4, 8}).requires_grad_();
  {
    const at::AutoGradMode on(true);
    entropy_of(flat, at::ones({500, 8})).sum().backward();
  }
  EXPECT_LT(flat.grad().abs().max().item<double>(),
            1e-4);  // log p + entropy of 6.2 each, rounded, times 500 p times 2 x 8
}

TEST(LinearCrossEntropy, EntropyIsThatOfTheSoftmaxAndCostsNothingUnlessAskedFor) {
  const auto targets = at::zeros({2}, kLong);
  // Of 30,000 equal logits, in several tiles, log 30,000; of one that leads by 200, 0.
  auto head = at::ones({30000, 4});
  const auto uniform = linear_cross_entropy(at::ones({2, 4}), head, targets, /*logit_scale=*/3, /*entropy=*/true);
  EXPECT_LT(relative_error(uniform.entropy, at::full({2}, std::log(30000.))), 1e-6);
  head[20000].fill_(51);
  const auto sharp = linear_cross_entropy(at::ones({2, 4}), head, targets, /*logit_scale=*/1, /*entropy=*/true);
  EXPECT_TRUE(sharp.entropy.equal(at::zeros({2})));
  EXPECT_EQ(linear_cross_entropy(at::ones({2, 4}), head, targets).entropy.numel(), 0);
}

TEST(LinearCrossEntropy, TheSameInputsGiveTheSameBits) {
  at::manual_seed(7);
  const auto p = draw({"twice", 2100, 16, 5000, 0.2});
  for (const auto type : {kFloat, kBFloat16}) {
    const auto inputs = to_type(p.inputs, type);
    const auto first = differentiate(entry(p, linear_cross_entropy), inputs, p.weights),
               second = differentiate(entry(p, linear_cross_entropy), inputs, p.weights);
    for (const int i : {0, 1}) {
      EXPECT_TRUE(first.outputs[i].equal(second.outputs[i]));
      EXPECT_TRUE(first.gradients[i].equal(second.gradients[i]));
    }
  }
}

TEST(LinearCrossEntropy, ExtremeLogitsStayFinite) {
  for (const auto type : {kFloat, kBFloat16}) {
    at::manual_seed(8);
    const auto p = draw({"extreme", 50, 16, 700, 0, 1e4});
    const auto got = differentiate(entry(p, linear_cross_entropy), to_type(p.inputs, type), p.weights);
    EXPECT_TRUE(got.outputs[0].isfinite().all().item<bool>());
    EXPECT_GE(got.outputs[0].min().item<double>(), 0);
    for (const int i : {0, 1}) EXPECT_TRUE(got.gradients[i].isfinite().all().item<bool>());
  }
}

TEST(LinearCrossEntropy, NanIsNotHidden) {
  at::manual_seed(9);
  auto p = draw({"nan", 5, 16, 700});
  p.inputs[1][650][3] = std::numeric_limits<double>::quiet_NaN();
  const auto got = entry(p, linear_cross_entropy)(to_type(p.inputs, kFloat));
  EXPECT_TRUE(got[0].isnan().all().item<bool>());
}

TEST(LinearCrossEntropy, OfEqualLogitsTheFirstIsPredicted) {
  const auto result = linear_cross_entropy(at::ones({3, 4}), at::ones({30000, 4}), at::zeros({3}, kLong));
  EXPECT_TRUE(result.predicted.equal(at::zeros({3}, kLong)));
  EXPECT_LT(relative_error(result.nll, at::full({3}, std::log(30000.))), 1e-6);
}

std::int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024L;
}

// Runs in a child, whose peak is its own. All logits are 660 MiB in float32; what may grow is 32 MiB of logits, 16 MiB
// of their gradients in bfloat16, the gradient of a tile of the weight, the results, packed or widened operands, a
// product's own buffers (without a matrix unit some 20 MiB) and the allocator's slack.
TEST(LinearCrossEntropyDeathTest, NeverHoldsMoreThanATileOfLogits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto grow = [](decltype(linear_cross_entropy)& function, std::int64_t tokens, std::int64_t vocabulary,
                       std::int64_t limit, bool entropy = false) {
    const auto options = at::TensorOptions().dtype(kBFloat16);
    at::ones({64, 64}, options).mm(at::ones({64, 64}, options));  // libraries load their code
    const auto hidden = at::randn({tokens, 32}, options).requires_grad_(),
               weight = at::randn({vocabulary, 32}, options).requires_grad_();
    const auto targets = at::randint(vocabulary, {tokens}, at::TensorOptions().dtype(kLong));
    const auto before = peak_bytes();
    const auto output = function(hidden, weight, targets, 1, entropy);
    (entropy ? output.nll - output.entropy : output.nll).sum().backward();
    const auto grown = peak_bytes() - before;
    std::fprintf(stderr, "grown by %ld MiB\n", static_cast<long>(grown >> 20));
    std::_Exit(grown <= limit ? 0 : 1);
  };
  constexpr std::int64_t kLimit = 128 << 20;
  EXPECT_EXIT(grow(linear_cross_entropy, 4352, 20000, kLimit), testing::ExitedWithCode(0), "grown");
  EXPECT_EXIT(grow(linear_cross_entropy, 4352, 20000, kLimit, true), testing::ExitedWithCode(0), "grown");
  EXPECT_EXIT(grow(linear_cross_entropy, 8704, 20000, kLimit), testing::ExitedWithCode(0), "grown");
  EXPECT_EXIT(grow(linear_cross_entropy, 1, 400000, kLimit), testing::ExitedWithCode(0), "grown");  // weight: 24 MiB
  // The measure sees what it should: holding all logits of a tenth of the tokens is already too much.
  EXPECT_EXIT(grow(linear_cross_entropy_definition, 870, 20000, kLimit), testing::ExitedWithCode(1), "grown");
}

TEST(LinearCrossEntropy, RefusesWhatItCannotMean) {
  const auto p = draw({"errors", 8, 8, 20});
  const auto expect_error = [&](const std::string& part, const Tensor& hidden, const Tensor& weight,
                                const Tensor& targets) {
    try {
      linear_cross_entropy(hidden, weight, targets);
      FAIL() << "expected an error with: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  const auto &hidden = p.inputs[0], &weight = p.inputs[1];
  for (const std::int64_t bad : {20, -2, -101}) {
    const auto targets = p.targets.clone();
    targets[5].fill_(bad);
    expect_error(fmt::format("the target at position 5 is {}", bad), hidden, weight, targets);
  }
  EXPECT_THROW(linear_cross_entropy(hidden, weight, p.targets, /*logit_scale=*/0), Error);
  expect_error("of one dtype", hidden, weight.to(kFloat), p.targets);
  expect_error("weight [V, D]", hidden, weight.narrow(1, 0, 7), p.targets);
  expect_error("int64 [T=8]", hidden, weight, p.targets.narrow(0, 0, 7));
}

TEST(LinearCrossEntropyLoss, IsTheWeightedSumWithItsGradientsBitForBit) {
  at::manual_seed(21);
  for (const auto type : {kFloat, kBFloat16}) {
    const auto hidden = at::randn({50, 16}).to(type).requires_grad_(),
               head = at::randn({300, 16}).to(type).requires_grad_();
    const auto loss_weight = at::rand({50});
    auto targets = at::randint(300, {50}, at::TensorOptions().dtype(kLong));
    targets.narrow(0, 7, 9).fill_(-100);
    const auto plain = linear_cross_entropy(hidden, head, targets);
    const auto sum = (plain.nll * loss_weight).sum();
    const auto want = torch::autograd::grad({sum}, {hidden, head});
    const auto [loss, predicted] = linear_cross_entropy_loss(hidden, head, targets, loss_weight);
    EXPECT_TRUE(loss.equal(sum));
    EXPECT_TRUE(predicted.equal(plain.predicted));
    const auto got = torch::autograd::grad({loss}, {hidden, head});
    for (const int i : {0, 1}) EXPECT_TRUE(got[i].equal(want[i])) << i;
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(linear_cross_entropy_loss(hidden, head, targets, loss_weight).loss.equal(sum));
  }
}

// As under LoRA: the hidden states get the same gradient, bit for bit, and the head none.
TEST(LinearCrossEntropy, AFrozenHeadGetsNoGradient) {
  at::manual_seed(22);
  const auto hidden = at::randn({50, 16}).requires_grad_(), head = at::randn({300, 16});
  const auto trained = head.clone().requires_grad_();
  const auto loss_weight = at::rand({50});
  const auto targets = at::randint(300, {50}, at::TensorOptions().dtype(kLong));
  const auto of_nll = [&](const Tensor& weight) {
    return torch::autograd::grad({linear_cross_entropy(hidden, weight, targets).nll.sum()}, {hidden})[0];
  };
  const auto of_loss = [&](const Tensor& weight) {
    return torch::autograd::grad({linear_cross_entropy_loss(hidden, weight, targets, loss_weight).loss}, {hidden})[0];
  };
  EXPECT_TRUE(of_nll(head).equal(of_nll(trained)));
  EXPECT_TRUE(of_loss(head).equal(of_loss(trained)));
  const auto whole = linear_cross_entropy(hidden, head, targets);
  const auto gradients = linear_cross_entropy_backward(at::ones({50}), hidden, head, targets, whole.lse,
                                                       /*logit_scale=*/1, /*weight_gradient=*/false);
  EXPECT_EQ(gradients.weight.numel(), 0);
}

}  // namespace
}  // namespace sluice
