// SPDX-License-Identifier: Apache-2.0
// For tests: a layer on the ranks of a mesh beside the same layer on one process.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "sluice/kernels/common/testing.h"
#include "sluice/layers/pack_pieces.h"
#include "sluice/layers/split.h"
#include "sluice/parallel/collectives.h"
#include "sluice/parallel/testing.h"

namespace sluice {

struct LayerOnMesh {
  std::function<std::unique_ptr<Module>()> make;
  std::function<Tensor(const Module&, const Tensor& x, const ForwardContext&)> forward;  // [T, width] to [T, ..]
  std::int64_t width;
  std::int64_t rotary_dim = 0;  // 0: no table
  std::int64_t vocab_size = 1;  // of the ids that the context has
};

// What a layer gives for a loss that weighs its output by given numbers.
struct LayerOutcome {
  Tensor out, grad_x;
  std::vector<Tensor> gradients;  // of the parameters as a whole; undefined where frozen
};

namespace mesh_testing {

// Ranks are threads, which share PyTorch's own generator.
inline at::Generator generator(std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// Drawn by name, so that each rank and the process alone have the same.
inline void draw_parameters(const std::vector<Parameter*>& parameters, const MeshPlace& place) {
  initialize(parameters, kFloat, /*seed=*/7);
  for (auto* parameter : parameters) {
    auto& value = parameter->value;
    if (!value.is_floating_point()) continue;
    // Weights that begin as a constant would hide a layer's terms.
    const auto seed = std::hash<std::string>{}(parameter->name);
    value = value.to(kDouble) + 0.3 * at::randn(value.sizes(), generator(seed), kDouble);
    value = take_piece(value, *parameter, place).clone();
    if (!parameter->frozen) value.requires_grad_();
  }
}

inline LayerOutcome run_layer(const LayerOnMesh& layer, const std::vector<std::int64_t>& lengths, const Mesh& mesh) {
  const auto pack = make_pack(lengths);
  const auto tokens = pack.positions.numel();
  const auto x = at::randn({tokens, layer.width}, generator(3), kDouble);
  const auto ids = at::randint(layer.vocab_size, {tokens}, generator(5), kLong);
  const auto split = split_tokens(lengths, mesh);
  const auto own = x.narrow(0, split.first, split.count).clone().requires_grad_();
  const ForwardContext context{
      .pack = pack,
      .tokens = ids,
      .rotary = layer.rotary_dim > 0 ? rotary_table(pack.positions, 10000, layer.rotary_dim) : RotaryTable(),
      .mesh = mesh,
      .split = split};
  const auto module = layer.make();
  const auto parameters = module->parameters();
  const auto place = place_of(mesh);
  draw_parameters(parameters, place);

  const auto out = layer.forward(*module, own, context);
  const auto weight = at::randn({tokens, out.size(1)}, generator(4), kDouble);
  (out * weight.narrow(0, split.first, split.count)).sum().backward();

  const auto& rows = split.piece_rows;
  const at::NoGradGuard no_grad;
  const auto grad_x = own.grad().defined() ? own.grad() : at::zeros_like(own);
  LayerOutcome outcome{all_gather_rows(out, rows, mesh.sequence()), all_gather_rows(grad_x, rows, mesh.sequence()), {}};
  for (const auto* parameter : parameters) {
    if (parameter->frozen) {
      outcome.gradients.emplace_back();
      continue;
    }
    // Each rank's part of the sum, in its place in the whole.
    auto whole = at::zeros(parameter->shape, kDouble);
    if (const auto& grad = parameter->value.grad(); grad.defined()) {
      std::int64_t row = 0;
      for (const auto& box : boxes_of(*parameter, place)) {
        rows_view(whole)
            .narrow(0, box.row, box.rows)
            .narrow(1, box.column, box.columns)
            .copy_(rows_view(grad).narrow(0, row, box.rows));
        row += box.rows;
      }
    }
    outcome.gradients.push_back(all_reduce_sum(whole, mesh.sequence()));
  }
  return outcome;
}

}  // namespace mesh_testing

// The layer in float64 on every rank of a mesh (dp = 1) gives what it gives alone: the output, the gradient of x and of
// every parameter, relative per tensor within `bound`.
inline void expect_same_on_mesh(const LayerOnMesh& layer, const std::vector<std::int64_t>& lengths,
                                const MeshSizes& sizes, double bound) {
  SCOPED_TRACE(
      fmt::format("cp {} tp {} ep {}, sequences {}", sizes.cp, sizes.tp, sizes.ep, c10::str(at::IntArrayRef(lengths))));
  const auto want = mesh_testing::run_layer(layer, lengths, one_process());
  const auto parameters_of = layer.make();
  const auto names = parameters_of->parameters();
  run_ranks(sizes.ranks(), [&](const World& world) {
    const Mesh mesh(world, sizes);
    const auto got = mesh_testing::run_layer(layer, lengths, mesh);
    EXPECT_LT(relative_error(got.out, want.out), bound) << "output";
    EXPECT_LT(relative_error(got.grad_x, want.grad_x), bound) << "gradient of x";
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i]->frozen) continue;
      EXPECT_LT(relative_error(got.gradients[i], want.gradients[i]), bound) << "gradient of " << names[i]->name;
    }
  });
}

}  // namespace sluice
