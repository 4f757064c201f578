// SPDX-License-Identifier: Apache-2.0
// Optimizer state shared among the ranks of a mesh.
#include "sluice/train/shards.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "sluice/parallel/collectives.h"
#include "sluice/parallel/testing.h"
#include "sluice/train/adamw.h"

namespace sluice {
namespace {

// Case P6: every element of the model counts once, and the norm is the same on every rank.
TEST(GradientSumOnAMesh, CountsEachElementOnce) {
  run_ranks(4, [](const World& world) {
    const Mesh mesh(world, {.dp = 2, .tp = 2, .ep = 2});
    Parameter replicated{.name = "replicated", .shape = {1}, .init = {}};
    Parameter experts{.name = "experts", .shape = {2, 1, 1}, .split = Split::experts(2), .init = {}};
    replicated.value = at::ones({1}).requires_grad_();
    experts.value = at::ones({1, 1, 1}).requires_grad_();
    GradientSum gradients({&replicated, &experts}, mesh);
    // Four ranks hold the first; two each expert. Together: 12, 3 and 4.
    const auto loss = replicated.value.sum() * 3.0 + experts.value.sum() * (mesh.ep().rank() == 0 ? 1.5 : 2.0);
    gradients.add(loss, /*last=*/true);
    EXPECT_DOUBLE_EQ(gradients.norm().item<double>(), 13) << "rank " << world.rank();
  });
}

// Ranks that hold the same piece hold the same bits after updates, bfloat16 weights too (case P2).
TEST(AdamWOnAMesh, KeepsPiecesTheSameWhereverTheyAreHeld) {
  run_ranks(4, [](const World& world) {
    const Mesh mesh(world, {.dp = 2, .tp = 2});
    Parameter norm{.name = "norm", .shape = {5}, .decay = false, .init = {}};
    Parameter columns{.name = "columns", .shape = {3, 6}, .split = Split::anywhere(1), .init = {}};
    Parameter shared{.name = "shared", .shape = {4, 2}, .split = Split::key_value_heads(0, 1), .init = {}};
    const std::vector<Parameter*> parameters{&norm, &columns, &shared};
    for (auto* parameter : parameters) {
      parameter->value = at::ones(local_shape(*parameter, place_of(mesh)), at::TensorOptions().dtype(kBFloat16));
      parameter->value.requires_grad_();
    }
    GradientSum gradients(parameters, mesh);
    AdamW optimizer(parameters, {.weight_decay = 0.1}, mesh);
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(world.rank()));
    for (int step = 0; step < 5; ++step) {
      auto loss = at::zeros({});
      for (const auto* parameter : parameters) {
        loss = loss + (parameter->value * at::empty(parameter->value.sizes()).normal_(0, 1, generator)).sum();
      }
      gradients.add(loss, /*last=*/true);
      optimizer.step(gradients, 0.01, at::scalar_tensor(1.0, at::TensorOptions().dtype(kDouble)));
      gradients.clear();
    }
    const auto expect_same = [&](const Parameter& parameter, const Group& holders) {
      const std::vector<std::int64_t> one(static_cast<std::size_t>(holders.size()), 1);
      for (const auto& its : all_gather_rows(parameter.value.detach().unsqueeze(0), one, holders).unbind(0)) {
        EXPECT_TRUE(its.equal(parameter.value)) << parameter.name;
      }
      EXPECT_TRUE(parameter.value.ne(1).any().item<bool>()) << parameter.name << " was not updated";
    };
    expect_same(norm, mesh.world());
    expect_same(columns, mesh.data());
    expect_same(shared, mesh.world());
  });
}

}  // namespace
}  // namespace sluice
