// SPDX-License-Identifier: Apache-2.0
// The layer gated_delta_net as an operator of PyTorch, so that bench/gated_delta_net.py can run it beside its peers in
// one process. The library holds the operators too and takes the place of libsluice_ops.so.
#include "sluice/layers/gated_delta_net.h"

#include "sluice/core/error.h"

namespace sluice {
namespace {

// `weights` in the order of the layer's parameters, conv1d of width 4, head dims 128, gated by a sigmoid.
Tensor layer(const Tensor& x, at::TensorList weights, const Tensor& cu_seqlens, std::int64_t key_heads,
             std::int64_t value_heads) {
  const GatedDeltaNet net({.hidden_size = x.size(1),
                           .num_key_heads = key_heads,
                           .num_value_heads = value_heads,
                           .key_head_dim = 128,
                           .value_head_dim = 128,
                           .conv_kernel_dim = 4,
                           .rms_norm_eps = 1e-6,
                           .initializer_range = 0.02,
                           .output_gate = GateActivation::kSigmoid});
  const auto parameters = net.parameters();
  SLUICE_CHECK(parameters.size() == weights.size(), "the layer has {} parameters; got {}", parameters.size(),
               weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    SLUICE_CHECK(weights[i].sizes() == at::IntArrayRef(parameters[i]->shape), "{} is {}; got {}", parameters[i]->name,
                 c10::str(parameters[i]->shape), describe(weights[i]));
    parameters[i]->value = weights[i];
  }
  Pack pack;
  pack.cu_seqlens = cu_seqlens;
  return net.forward(x, {.pack = pack, .rotary = {}}, nullptr);
}

TORCH_LIBRARY(sluice_bench, m) {
  m.def("gated_delta_net(Tensor x, Tensor[] weights, Tensor cu_seqlens, int key_heads, int value_heads) -> Tensor",
        layer);
}

}  // namespace
}  // namespace sluice
