// SPDX-License-Identifier: Apache-2.0
// The layer gated_delta_net as an operator of PyTorch, so that bench/gated_delta_net.py can run it beside its peers in
// one process, and bench/parallel_layer.py on several GPUs. The library holds the operators too and takes the place of
// libsluice_ops.so.
#include "sluice/layers/gated_delta_net.h"

#include <map>

#include "sluice/core/error.h"
#include "sluice/parallel/collectives.h"
#include "sluice/parallel/world.h"

namespace sluice {
namespace {

GatedDeltaNetSizes sizes_of(std::int64_t hidden_size, std::int64_t key_heads, std::int64_t value_heads) {
  return {.hidden_size = hidden_size,
          .num_key_heads = key_heads,
          .num_value_heads = value_heads,
          .key_head_dim = 128,
          .value_head_dim = 128,
          .conv_kernel_dim = 4,
          .rms_norm_eps = 1e-6,
          .initializer_range = 0.02,
          .output_gate = GateActivation::kSigmoid};
}

// Of the processes that the environment tells of, one a GPU. Meshes stay until the process ends.
const Mesh& mesh_of(std::int64_t cp, std::int64_t tp, at::Device device) {
  if (cp * tp == 1) return one_process();
  static const World world(read_launch(), std::chrono::seconds(60), device);
  static std::map<std::pair<std::int64_t, std::int64_t>, Mesh> meshes;
  return meshes.try_emplace({cp, tp}, world, MeshSizes{.cp = cp, .tp = tp}).first->second;
}

// `weights` in the order of the layer's parameters, of this rank: conv1d of width 4, head dims 128, gated by a sigmoid.
// Heads are counted over all ranks. x are this rank's tokens of a pack of these lengths.
Tensor layer(const Tensor& x, at::TensorList weights, at::IntArrayRef lengths, std::int64_t key_heads,
             std::int64_t value_heads, std::int64_t cp, std::int64_t tp) {
  const auto& mesh = mesh_of(cp, tp, x.device());
  const GatedDeltaNet net(sizes_of(x.size(1), key_heads, value_heads));
  const auto parameters = net.parameters();
  SLUICE_CHECK(parameters.size() == weights.size(), "the layer has {} parameters; got {}", parameters.size(),
               weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto shape = local_shape(*parameters[i], place_of(mesh));
    SLUICE_CHECK(weights[i].sizes() == at::IntArrayRef(shape), "{} is {}; got {}", parameters[i]->name,
                 c10::str(at::IntArrayRef(shape)), describe(weights[i]));
    parameters[i]->value = weights[i];
  }
  const auto pack = make_pack(lengths.vec(), {}, {}, x.device());
  return net.forward(x, {.pack = pack, .rotary = {}, .mesh = mesh, .split = split_tokens(pack.lengths, mesh)}, nullptr);
}

// Where the ranks' pieces of a pack begin, and where the last ends.
std::vector<std::int64_t> bounds(at::IntArrayRef lengths, std::int64_t cp, std::int64_t tp) {
  return piece_bounds(lengths.vec(), cp, tp);
}

// This rank's pieces of the layer's weights.
std::vector<Tensor> pieces(at::TensorList weights, std::int64_t key_heads, std::int64_t value_heads, std::int64_t cp,
                           std::int64_t tp) {
  const GatedDeltaNet net(sizes_of(weights[0].size(1), key_heads, value_heads));
  const auto parameters = net.parameters();
  const auto place = place_of(mesh_of(cp, tp, weights[0].device()));
  std::vector<Tensor> result;
  for (std::size_t i = 0; i < weights.size(); ++i)
    result.push_back(take_piece(weights[i], *parameters[i], place).clone());
  return result;
}

// Their sums over the ranks that hold the same piece, in float32 as training forms them.
std::vector<Tensor> sum_gradients(at::TensorList gradients, std::int64_t key_heads, std::int64_t value_heads,
                                  std::int64_t cp, std::int64_t tp) {
  const auto& mesh = mesh_of(cp, tp, gradients[0].device());
  const GatedDeltaNet net(sizes_of(gradients[0].size(1), key_heads, value_heads));
  const auto parameters = net.parameters();
  std::vector<Tensor> result;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto count = count_pieces(parameters[i]->split, place_of(mesh));
    result.push_back(all_reduce_sum(gradients[i].to(kFloat), mesh.holders(count, 1)));
  }
  return result;
}

TORCH_LIBRARY(sluice_bench, m) {
  m.def(
      "gated_delta_net(Tensor x, Tensor[] weights, int[] lengths, int key_heads, int value_heads, int cp=1, int tp=1) "
      "-> Tensor",
      layer);
  m.def("piece_bounds(int[] lengths, int cp, int tp) -> int[]", bounds);
  m.def("pieces(Tensor[] weights, int key_heads, int value_heads, int cp, int tp) -> Tensor[]", pieces);
  m.def("sum_gradients(Tensor[] gradients, int key_heads, int value_heads, int cp, int tp) -> Tensor[]", sum_gradients);
}

}  // namespace
}  // namespace sluice
