// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/gradient_sum.h"

#include <gtest/gtest.h>

#include "sluice/core/testing.h"
#include "sluice/parallel/testing.h"

namespace sluice {
namespace {

Parameter parameter(const std::string& name, at::IntArrayRef shape, at::ScalarType type) {
  Parameter made{.name = name, .shape = shape.vec(), .init = {}};
  made.value = at::ones(shape, at::TensorOptions().dtype(type)).requires_grad_();
  return made;
}

// Whose gradient is `gradient` everywhere.
Tensor loss(const Parameter& parameter, double gradient) { return (parameter.value * gradient).sum(); }

TEST(GradientSum, AddsMicroBatchesInFloat32) {
  auto p = parameter("w", {2}, kBFloat16);
  GradientSum gradients({&p});
  for (int i = 0; i < 256; ++i) {
    gradients.add(loss(p, i == 0 ? 256 : 1), /*last=*/i == 255);
    EXPECT_FALSE(p.value.grad().defined());
  }
  EXPECT_EQ(gradients.of(0)[0].item<double>(), 256 + 255);  // a bfloat16 sum would stay at 256
}

TEST(GradientSum, NormCoversAllParameters) {
  auto a = parameter("a", {1}, kFloat), b = parameter("b", {2}, kFloat), untouched = parameter("c", {9}, kFloat);
  GradientSum gradients({&a, &b, &untouched});
  gradients.add(loss(a, 12) + (b.value * at::tensor({3.f, 4.f})).sum(), /*last=*/true);
  EXPECT_DOUBLE_EQ(gradients.norm().item<double>(), 13);
  EXPECT_EQ(gradients.first_not_finite(), "");
  gradients.add((b.value * at::tensor({0.f, INFINITY})).sum(), /*last=*/true);
  EXPECT_EQ(gradients.first_not_finite(), "b");
}

TEST(GradientSum, LeavesParametersAsTheyWere) {
  auto p = parameter("w", {2}, kFloat);
  {
    GradientSum gradients({&p});
    gradients.add(loss(p, 1), /*last=*/true);
  }
  loss(p, 3).backward();
  EXPECT_EQ(p.value.grad()[0].item<double>(), 3);
}

TEST(GradientSum, StaysInPlaceWhereThatIsAskedFor) {
  auto p = parameter("w", {2}, kFloat), untouched = parameter("c", {2}, kBFloat16);
  GradientSum gradients({&p, &untouched});
  gradients.add(loss(p, 1), /*last=*/false);
  gradients.keep_places();
  const auto first = gradients.of(0), second = gradients.of(1);
  gradients.add(loss(p, 2), /*last=*/true);
  EXPECT_EQ(first[0].item<double>(), 3);
  EXPECT_EQ(second[0].item<double>(), 0);
  gradients.clear();
  gradients.add(loss(p, 5) + loss(untouched, 4), /*last=*/true);
  EXPECT_TRUE(gradients.of(0).is_same(first) && gradients.of(1).is_same(second));
  EXPECT_EQ(first[0].item<double>(), 5);
  EXPECT_EQ(second[0].item<double>(), 4);
}

// Buckets of one parameter or two; gradients that come in another order on each rank, or not at all; one parameter that
// nobody else holds. Every sum is of small whole numbers, so it is exact in any order.
void expect_sums_over_ranks(GradientSum::Kept kept) {
  run_ranks(4, [&](const World& world) {
    const Mesh mesh(world, {.dp = 2, .tp = 2, .ep = 2});
    std::vector<Parameter> made;
    for (int i = 0; i < 6; ++i)
      made.push_back(parameter("w" + std::to_string(i), {5, 3}, i % 2 == 0 ? kFloat : kBFloat16));
    made[4] = parameter("split", {4, 3}, kFloat);
    made[4].shape = {8, 3};
    made[4].split = Split::anywhere(0);
    std::vector<Parameter*> parameters;
    for (auto& p : made) parameters.push_back(&p);
    GradientSum gradients(parameters, mesh, kept, /*bucket_elements=*/30);
    const Shards shards(parameters, mesh);
    for (int step = 0; step < 2; ++step) {
      std::vector<double> want(made.size(), 0);
      for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
        auto sum = at::zeros({});
        for (std::size_t turn = 0; turn < made.size(); ++turn) {
          const auto i = world.rank() % 2 == 0 ? turn : made.size() - 1 - turn;
          const auto gradient = [&](std::int64_t rank) {
            const bool has_none = i == 5 || (i == 2 && rank == 1) || (i == 3 && micro_batch == 2);
            return has_none ? 0.0 : static_cast<double>((i + 1) * (rank + 2) + micro_batch + step);
          };
          if (gradient(world.rank()) != 0) sum = sum + loss(made[i], gradient(world.rank()));
          for (std::int64_t rank = 0; rank < 4; ++rank) {
            if (i != 4 || rank % 2 == world.rank() % 2) want[i] += gradient(rank);
          }
        }
        gradients.add(sum, /*last=*/micro_batch == 2);
      }
      for (std::size_t i = 0; i < made.size(); ++i) {
        const auto own = shards.own_rows(i, made[i].value.detach());
        EXPECT_TRUE(gradients.of(i).equal(at::full_like(own, want[i], at::TensorOptions().dtype(kFloat))))
            << made[i].name << " on rank " << world.rank();
      }
      gradients.clear();
    }
  });
}

TEST(GradientSumOnAMesh, EqualsTheSumWhateverOrderGradientsComeIn) { expect_sums_over_ranks(GradientSum::Kept::kHeld); }

TEST(GradientSumOnAMesh, EqualsTheSumWhereOwnedRowsAloneAreKept) { expect_sums_over_ranks(GradientSum::Kept::kOwned); }

// Where a rank is gone, an exchange that goes on beside the backward pass breaks as any other does.
TEST(GradientSumOnAMesh, ARankThatVanishesEndsTheOthers) {
  std::string message;
  run_ranks(
      2,
      [&](const World& world) {
        const Mesh mesh(world, {.dp = 2});
        auto p = parameter("w", {2}, kFloat);
        GradientSum gradients({&p}, mesh);
        const auto add = [&] {
          gradients.clear();
          gradients.add(loss(p, 1), /*last=*/true);
        };
        if (world.rank() == 1) return add();
        message = error_of(
            [&] {
              add();
              add();
            },
            ExitCode::kRuntime);
      },
      std::chrono::seconds(6));
  EXPECT_NE(message.find("No word from rank 1"), std::string::npos) << message;
  EXPECT_NE(message.find("reduce-scatter"), std::string::npos) << message;
}

}  // namespace
}  // namespace sluice
