// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/testing.h"
#include "sluice/kernels/delta_gates/cases.h"
#include "sluice/kernels/delta_gates/delta_gates.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kInputs[] = {"a", "b", "A_log", "dt_bias"};
const auto kF64 = at::TensorOptions().dtype(kDouble);

Operator entry(decltype(delta_gates)& function) {
  return [&function](const std::vector<Tensor>& x) {
    const auto gates = function(x[0], x[1], x[2], x[3]);
    return std::vector{gates.g, gates.beta};
  };
}

// a and b in `type`, the parameters in its accumulation type.
void expect_equal_to_definition(at::ScalarType type, double bound, double rounded_bound) {
  for (const auto& c : delta_gates_cases()) {
    SCOPED_TRACE(c.name);
    at::manual_seed(1);
    const auto wide = type == kDouble ? kDouble : kFloat;
    const std::vector<Tensor> inputs{(at::randn({c.tokens, c.heads}, kF64) * c.scale).to(type),
                                     (at::randn({c.tokens, c.heads}, kF64) * c.scale).to(type),
                                     at::empty({c.heads}, kF64).uniform_(0.01, 16).log().to(wide),
                                     at::randn({c.heads}, kF64).to(wide)};
    const std::vector<Tensor> weights{at::rand({c.tokens, c.heads}, kF64).to(wide),
                                      at::rand({c.tokens, c.heads}, kF64).to(wide)};
    const auto got = differentiate(entry(delta_gates), inputs, weights);
    const auto want = differentiate(entry(delta_gates_definition), to_type(inputs, kDouble), weights);
    for (const int i : {0, 1}) EXPECT_LE(relative_error(got.outputs[i], want.outputs[i]), bound);
    for (const int i : {0, 1, 2, 3}) {
      EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), i < 2 ? rounded_bound : bound)
          << "gradient of " << kInputs[i];
    }
  }
}

TEST(DeltaGates, MatchesItsDefinitionInFloat64) { expect_equal_to_definition(kDouble, 1e-12, 1e-12); }

// An exponential, a logarithm and a few products: some 1e-7. All terms of the sums over tokens have one sign here.
TEST(DeltaGates, MatchesItsDefinitionInFloat32) { expect_equal_to_definition(kFloat, 1e-6, 1e-6); }

// Only the gradients of a and b are rounded to bfloat16, at most 2^-9 relative each.
TEST(DeltaGates, MatchesItsDefinitionInBfloat16) { expect_equal_to_definition(kBFloat16, 1e-6, 2e-3); }

TEST(DeltaGates, ExtremeProjectionsStayFinite) {
  for (const double value : {0., 1e30, -1e30}) {
    SCOPED_TRACE(value);
    const auto got = differentiate(entry(delta_gates),
                                   {at::full({3, 2}, value), at::full({3, 2}, value), at::zeros({2}), at::zeros({2})},
                                   {at::ones({3, 2}), at::ones({3, 2})});
    for (const int i : {0, 1}) EXPECT_TRUE(at::isfinite(got.outputs[i]).all().item<bool>());
    for (const int i : {0, 1, 3}) EXPECT_TRUE(at::isfinite(got.gradients[i]).all().item<bool>()) << kInputs[i];
  }
}

TEST(DeltaGates, WritesGradientsWhereALayerWantsThem) {
  at::manual_seed(2);
  auto projection = at::randn({33, 20}).to(kBFloat16);
  auto b = projection.narrow(1, 4, 6), a = projection.narrow(1, 10, 6);
  const auto A_log = at::randn({6}), dt_bias = at::randn({6}), grad_g = at::randn({33, 6}),
             grad_beta = at::randn({33, 6});
  const auto want = differentiate(entry(delta_gates), {a, b, A_log, dt_bias}, {grad_g, grad_beta});
  const auto [grad_A_log, grad_dt_bias] = delta_gates_backward(grad_g, grad_beta, a, b, A_log, dt_bias, a, b);
  EXPECT_TRUE(a.equal(want.gradients[0]));
  EXPECT_TRUE(b.equal(want.gradients[1]));
  EXPECT_TRUE(grad_A_log.equal(want.gradients[2]));
  EXPECT_TRUE(grad_dt_bias.equal(want.gradients[3]));
}

TEST(DeltaGates, RefusesWhatItCannotMean) {
  const auto a = at::ones({8, 6}), parameter = at::ones({6});
  EXPECT_THAT(
      [&] {
        delta_gates(a, at::ones({8, 5}), parameter, parameter);
      },
      ThrowsMessage<Error>(HasSubstr("a and b must be [T, H] of one dtype")));
  EXPECT_THAT([&] { delta_gates(a, a, parameter.to(kBFloat16), parameter); },
              ThrowsMessage<Error>(HasSubstr("A_log and dt_bias must be Float [H=6]")));
}

}  // namespace
}  // namespace sluice
