// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/collectives.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "sluice/parallel/mesh.h"
#include "sluice/parallel/paper_exchanges.h"
#include "sluice/parallel/testing.h"

namespace sluice {
namespace {

using Counts = std::vector<std::int64_t>;

// Runs on that many ranks, as one tensor-parallel group.
void on_group(std::int64_t size, const std::function<void(const Group&)>& rank_main) {
  run_ranks(size, [&](const World& world) {
    const Mesh mesh(world, {.tp = size});
    barrier(mesh.tp());  // who has nothing to exchange would be gone while others still connect
    rank_main(mesh.tp());
  });
}

// Numbers that differ with rank and place, small integers: sums of them are exact.
Tensor numbers_of(std::int64_t rank, std::int64_t rows) {
  return at::arange(rows * 6, kFloat).remainder(7).view({rows, 2, 3}) + 10 * rank;
}

Tensor all_numbers(const Counts& rows) {
  std::vector<Tensor> parts;
  for (std::size_t i = 0; i < rows.size(); ++i) parts.push_back(numbers_of(static_cast<std::int64_t>(i), rows[i]));
  return at::cat(parts);
}

Tensor own_part(const Tensor& x, const Counts& rows, std::int64_t rank) { return x.split_with_sizes(rows)[rank]; }

Tensor gradient(const Tensor& out, const Tensor& x, const Tensor& grad_out) {
  return torch::autograd::grad({out}, {x}, {grad_out})[0];
}

const std::vector<Counts> kRows{{3, 3}, {3, 2}, {0, 4}, {0, 0}, {2, 2, 2, 2}, {1, 0, 5, 2}};

TEST(AllGatherRows, PutsTheRowsOneBehindTheOtherAndAddsTheirGradients) {
  for (const auto& rows : kRows) {
    on_group(static_cast<std::int64_t>(rows.size()), [&](const Group& group) {
      const auto x = numbers_of(group.rank(), rows[group.rank()]).requires_grad_();
      const auto all = all_gather_rows(x, rows, group);
      EXPECT_TRUE(all.equal(all_numbers(rows)));
      // Each rank's loss weighs row t of the result by its own rank + 1.
      const auto weights = at::full_like(all, static_cast<double>(group.rank() + 1));
      const auto n = group.size(), weight = n * (n + 1) / 2;
      EXPECT_TRUE(gradient(all, x, weights).equal(at::full_like(x, static_cast<double>(weight))));
    });
  }
}

TEST(ReduceScatterRows, GivesEachItsRowsOfTheSumAndGathersTheirGradients) {
  for (const auto& rows : kRows) {
    on_group(static_cast<std::int64_t>(rows.size()), [&](const Group& group) {
      const auto n = group.size();
      const auto x = (all_numbers(rows) * (group.rank() + 1)).requires_grad_();
      const auto own = reduce_scatter_rows(x, rows, group);
      EXPECT_TRUE(own.equal(own_part(all_numbers(rows), rows, group.rank()) * (n * (n + 1) / 2)));
      EXPECT_TRUE(gradient(own, x, numbers_of(group.rank(), rows[group.rank()])).equal(all_numbers(rows)));
    });
  }
}

TEST(MemberByMember, OwnRowsAreUsedFirstAndMadeLast) {
  for (const auto& rows : kRows) {
    on_group(static_cast<std::int64_t>(rows.size()), [&](const Group& group) {
      const auto all = all_numbers(rows);
      std::vector<std::int64_t> used, made;  // where rows begin
      const auto gathered = all_gather_rows_while(numbers_of(group.rank(), rows[group.rank()]), rows, group,
                                                  [&](std::int64_t begin, const Tensor& its) {
                                                    EXPECT_TRUE(its.equal(all.narrow(0, begin, its.size(0))));
                                                    used.push_back(begin);
                                                  });
      EXPECT_TRUE(gathered.equal(all));
      const auto sum = reduce_scatter_rows_while(
          rows, group,
          [&](std::int64_t begin, std::int64_t count) {
            made.push_back(begin);
            return all.narrow(0, begin, count) * (group.rank() + 1);
          },
          [&] { made.push_back(-1); });
      const auto n = group.size();
      EXPECT_TRUE(sum.equal(own_part(all, rows, group.rank()) * (n * (n + 1) / 2)));
      const auto own = std::accumulate(rows.begin(), rows.begin() + group.rank(), std::int64_t{0});
      EXPECT_EQ(std::ssize(used), n);
      EXPECT_EQ(used.front(), own);
      EXPECT_EQ(std::ssize(made), n + 1);
      EXPECT_EQ(made[static_cast<std::size_t>(n - 1)], own);
      EXPECT_EQ(made.back(), -1);
    });
  }
}

TEST(AllToAllRows, GivesEachWhatTheOthersSendItAndGradientsTheWayBack) {
  // sent[i][j]: rows from i to j.
  for (const auto& sent : std::vector<std::vector<Counts>>{
           {{1, 2}, {0, 3}}, {{0, 0}, {4, 0}}, {{0, 0}, {0, 0}}, {{1, 2, 3}, {0, 0, 0}, {4, 0, 1}}}) {
    on_group(static_cast<std::int64_t>(sent.size()), [&](const Group& group) {
      const auto& send = sent[group.rank()];
      Counts receive;
      std::vector<Tensor> expected;
      for (std::size_t i = 0; i < sent.size(); ++i) {
        receive.push_back(sent[i][group.rank()]);
        const auto rows = std::accumulate(sent[i].begin(), sent[i].end(), std::int64_t{0});
        expected.push_back(own_part(numbers_of(static_cast<std::int64_t>(i), rows), sent[i], group.rank()));
      }
      const auto rows = std::accumulate(send.begin(), send.end(), std::int64_t{0});
      const auto x = numbers_of(group.rank(), rows).requires_grad_();
      const auto got = all_to_all_rows(x, send, receive, group);
      EXPECT_TRUE(got.equal(at::cat(expected)));
      EXPECT_TRUE(gradient(got, x, got.detach()).equal(x));
    });
  }
}

TEST(AllReduceSum, AddsValuesAndGradients) {
  on_group(3, [](const Group& group) {
    const auto x = numbers_of(group.rank(), 2).requires_grad_();
    const auto sum = all_reduce_sum(x, group);
    EXPECT_TRUE(sum.equal(numbers_of(0, 2) + numbers_of(1, 2) + numbers_of(2, 2)));
    EXPECT_TRUE(gradient(sum, x, at::full_like(x, static_cast<double>(group.rank()))).equal(at::full_like(x, 3)));
  });
}

TEST(Collectives, TakeTheTypesThatModelsHave) {
  on_group(2, [](const Group& group) {
    for (const auto type : {kFloat, kDouble, kBFloat16, kLong}) {
      const auto x = at::full({1, 2}, group.rank() + 1, type);
      EXPECT_TRUE(all_gather_rows(x, Counts{1, 1}, group).equal(at::tensor({1, 1, 2, 2}).to(type).view({2, 2})));
      EXPECT_TRUE(all_reduce_sum(x, group).equal(at::full({1, 2}, 3, type)));
      EXPECT_TRUE(reduce_scatter_rows(at::ones({3}, type), Counts{1, 2}, group)
                      .equal(at::full({x.size(0) + group.rank()}, 2, type)));
      EXPECT_TRUE(
          all_to_all_rows(x, Counts{1 - group.rank(), group.rank()}, Counts{1 - group.rank(), group.rank()}, group)
              .equal(x));
    }
  });
}

TEST(Collectives, ShareTheLargestARootsValuesAndNumbers) {
  on_group(3, [](const Group& group) {
    auto x = at::tensor({group.rank(), 2 - group.rank()}, kFloat);
    all_reduce_max_(x, group);
    EXPECT_TRUE(x.equal(at::tensor({2.F, 2.F})));
    auto column = at::full({2, 3}, group.rank(), kFloat).select(1, 1);  // not contiguous
    broadcast_(column, 1, group);
    EXPECT_TRUE(column.equal(at::ones({2})));
    EXPECT_EQ(all_gather_numbers({group.rank(), 7}, group), (std::vector<Counts>{{0, 7}, {1, 7}, {2, 7}}));
    barrier(group);
  });
}

TEST(Collectives, AreTheIdentityAlone) {
  const auto x = numbers_of(0, 4);
  EXPECT_TRUE(all_gather_rows(x, Counts{4}, Group()).is_same(x));
  EXPECT_TRUE(reduce_scatter_rows(x, Counts{4}, Group()).is_same(x));
  EXPECT_TRUE(all_to_all_rows(x, Counts{4}, Counts{4}, Group()).is_same(x));
  EXPECT_TRUE(all_reduce_sum(x, Group()).is_same(x));
}

TEST(PaperExchanges, CountWhatLeavesARank) {
  const Mesh mesh({.cp = 2, .tp = 2}, /*rank=*/0);
  const auto x = at::empty({6, 4}, at::TensorOptions().dtype(kFloat).device(at::kMeta));
  const std::vector<std::int64_t> rows{3, 3}, own{6, 6};
  PaperExchanges::Sums waited_for, beside;
  {
    const PaperExchanges counted;
    all_gather_rows(x, own, mesh.tp());       // to 12 x 4: half of 192 bytes
    reduce_scatter_rows(x, rows, mesh.tp());  // half of 96
    all_to_all_rows(x, rows, rows, mesh.cp());
    all_reduce_sum(x, mesh.world());  // three quarters of 96, twice
    start_reduce_scatter_rows(x, rows, mesh.cp())();
    start_all_gather_rows(x, own, mesh.cp())();
    waited_for = counted.waited_for();
    beside = counted.beside();
  }
  all_reduce_sum(x, mesh.world());  // nobody counts
  ASSERT_EQ(waited_for.size(), 3U);
  EXPECT_EQ((waited_for[{0, 1}].bytes), 96 + 48);
  EXPECT_EQ((waited_for[{0, 1}].calls), 2);
  EXPECT_EQ((waited_for[{0, 2}].bytes), 48);
  EXPECT_EQ((waited_for[{0, 1, 2, 3}].bytes), 144);
  ASSERT_EQ(beside.size(), 1U);
  EXPECT_EQ((beside[{0, 2}].bytes), 48 + 96);
}

TEST(StartedAllGather, GoesOnBesideOtherExchanges) {
  run_ranks(2, [](const World& world) {
    const Mesh mesh(world, {.cp = 2});
    const std::vector<std::int64_t> rows{1, 2}, none{0, 0};
    const auto gathered = start_all_gather_rows(at::full({rows[world.rank()], 2}, world.rank()), rows, mesh.cp());
    const auto empty = start_all_gather_rows(at::ones({0, 2}), none, mesh.cp());
    EXPECT_EQ(all_reduce_sum(at::ones({1}), mesh.cp()).item<double>(), 2);
    EXPECT_EQ(empty().size(0), 0);
    EXPECT_TRUE(gathered().equal(at::tensor({0, 0, 1, 1, 1, 1}, kLong).view({3, 2})));
  });
}

TEST(StartedReduceScatter, GoesOnBesideOtherExchanges) {
  run_ranks(2, [](const World& world) {
    const Mesh mesh(world, {.cp = 2});
    const std::vector<std::int64_t> rows{1, 2};
    const auto& holders = mesh.holders(1, 1);
    std::vector<std::function<Tensor()>> started;
    for (int i = 0; i < 3; ++i) {
      started.push_back(start_reduce_scatter_rows(at::full({3, 2}, i + world.rank()), rows, holders));
    }
    EXPECT_EQ(all_reduce_sum(at::ones({1}), mesh.cp()).item<double>(), 2);  // the same ranks, in a group of its own
    for (int i = 2; i >= 0; --i) {
      EXPECT_TRUE(started[static_cast<std::size_t>(i)]().equal(at::full({rows[world.rank()], 2}, 2 * i + 1)));
    }
  });
}

}  // namespace
}  // namespace sluice
