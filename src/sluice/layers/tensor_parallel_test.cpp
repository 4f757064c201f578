// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/tensor_parallel.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "sluice/layers/lora.h"
#include "sluice/layers/mesh_testing.h"

namespace sluice {
namespace {

using Rows = std::vector<std::int64_t>;
constexpr std::int64_t kWidth = 6, kInner = 4;

// 4096 rows a rank and more on average: exchanges go on beside products. Odd ones, and ranks with none.
const std::vector<Rows> kLong{{4096, 4096}, {4097, 4099}, {0, 8195}, {8193, 0}, {5000, 7291, 1}, {1, 0, 9001, 7383}};
const std::vector<Rows> kShort{{2, 3}, {0, 4}, {0, 0}};

// Draws the same on every rank; x and the weights of a rank differ from the others'.
Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  return at::randn(shape, mesh_testing::generator(seed), kDouble);
}

Linear& with_weight(Linear& linear, const Tensor& weight) {
  linear.parameters()[0]->value = weight;
  return linear;
}

void on_ranks(const Rows& rows, const std::function<void(const ForwardContext&)>& rank_main) {
  SCOPED_TRACE(c10::str(at::IntArrayRef(rows)));
  run_ranks(static_cast<std::int64_t>(rows.size()), [&](const World& world) {
    const Mesh mesh(world, {.tp = world.size()});
    barrier(mesh.tp());  // who has nothing to exchange would be gone while others still connect
    const auto tokens = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    const auto pack = make_pack({tokens});
    auto split = split_tokens(std::vector{tokens}, mesh);
    split.rows = rows;
    split.count = rows[static_cast<std::size_t>(world.rank())];
    rank_main({.pack = pack, .rotary = {}, .mesh = mesh, .split = split});
    barrier(mesh.tp());
  });
}

std::vector<Tensor> gradients_of(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> weights;
  for (std::size_t i = 0; i < outputs.size(); ++i) weights.push_back(drawn(outputs[i].sizes(), 20 + i));
  return torch::autograd::grad(outputs, inputs, weights, /*retain_graph=*/true);
}

constexpr double kBound = 1e-14;  // float64: up to four numbers are summed in another order

void expect_near(const std::vector<Tensor>& got, const std::vector<Tensor>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_LT(relative_error(got[i], want[i]), kBound) << "number " << i;
}

TEST(ColumnParallel, MultipliesTheTokensOfAllRanks) {
  for (const auto& lists : {kLong, kShort}) {
    for (const auto& rows : lists) {
      on_ranks(rows, [&](const ForwardContext& context) {
        const auto rank = static_cast<std::uint64_t>(context.mesh.tp().rank());
        const auto own = drawn({context.split.count, kWidth}, 1 + rank).requires_grad_();
        const auto first = drawn({kInner, kWidth}, 10 + rank).requires_grad_();
        const auto second = drawn({3, kWidth}, 15 + rank).requires_grad_();
        const auto all = gather_tokens(own, context);
        const auto got = gathered_products(own, {first, second}, context);
        EXPECT_TRUE(got.x.equal(all));
        const std::vector want{at::linear(all, first), at::linear(all, second)};
        expect_near(got.y, want);
        expect_near(gradients_of(got.y, {own, first, second}), gradients_of(want, {own, first, second}));
        // The gathered tokens have uses of their own.
        expect_near(gradients_of({got.y[0], got.x}, {own, first}), gradients_of({want[0], all}, {own, first}));
        // What is frozen takes no part.
        const auto frozen = gathered_products(own, {first.detach()}, context);
        expect_near(gradients_of(frozen.y, {own}), gradients_of({want[0]}, {own}));
      });
    }
  }
}

TEST(RowParallel, SumsOverTheRanksAndGivesEachItsTokens) {
  for (const auto& lists : {kLong, kShort}) {
    for (const auto& rows : lists) {
      on_ranks(rows, [&](const ForwardContext& context) {
        const auto rank = static_cast<std::uint64_t>(context.mesh.tp().rank());
        const auto x = drawn({context.split.context_count, kInner}, 1 + rank).requires_grad_();
        const auto weight = drawn({kWidth, kInner}, 10 + rank).requires_grad_();
        Linear linear(kWidth, kInner, 1);
        const auto got = row_parallel(x, with_weight(linear, weight), context);
        const auto want = scatter_tokens(at::linear(x, weight), context);
        expect_near({got}, {want});
        expect_near(gradients_of({got}, {x, weight}), gradients_of({want}, {x, weight}));
        const auto frozen = row_parallel(x, with_weight(linear, weight.detach()), context);
        expect_near(gradients_of({frozen}, {x}), gradients_of({want}, {x}));
      });
    }
  }
}

TEST(TensorParallel, AdaptersAddToLongPacksToo) {
  on_ranks({4095, 4097}, [&](const ForwardContext& context) {
    const auto rank = static_cast<std::uint64_t>(context.mesh.tp().rank());
    const auto own = drawn({context.split.count, kWidth}, 1 + rank).requires_grad_();
    Linear column(kInner, kWidth, 1), row(kWidth, kInner, 1);
    with_weight(column, drawn({kInner, kWidth}, 10 + rank));
    with_weight(row, drawn({kWidth, kInner}, 12 + rank));
    std::vector<Tensor> inputs{own};
    for (auto* linear : {&column, &row}) {
      auto& parameter = *linear->parameters()[0];
      const auto A = drawn({2, parameter.shape[1]}, 14 + rank), B = drawn({parameter.shape[0], 2}, 16 + rank);
      set_adapter(parameter, A.requires_grad_(), B.requires_grad_(), /*scale=*/0.5);
      inputs.insert(inputs.end(), {A, B});
    }
    const auto got = row_parallel(column_parallel(own, {&column}, context).y[0], row, context);
    const auto want = scatter_tokens(row.forward(column.forward(gather_tokens(own, context))), context);
    expect_near({got}, {want});
    expect_near(gradients_of({got}, inputs), gradients_of({want}, inputs));
  });
}

}  // namespace
}  // namespace sluice
