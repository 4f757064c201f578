// SPDX-License-Identifier: Apache-2.0
// For the parity tests: runs a model folder on packed sequences and writes logits and gradients.
//   model_outputs MODEL float32|bfloat16 RECOMPUTE(0|1) SEQUENCES.json OUT.safetensors
// SEQUENCES.json holds a list of token lists. OUT holds "logits" [T, V] float32 and, for the loss summed over all
// sequences' next tokens, "loss" and "grad.NAME" of each parameter by its name in memory.
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/cli/model_loading.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {
namespace {

void write_tensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& named) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : named) infos.push_back(tensor_info(name, tensor));
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, tensor] : named) writer.write(tensor_bytes(tensor));
  writer.commit();
}

void run(char** argv) {
  const auto dtype = std::string(argv[2]) == "float32" ? Precision::kFloat32 : Precision::kBfloat16;
  auto loaded = load_model(argv[1], DeviceChoice::kCpu, dtype);
  auto& decoder = *loaded.model.decoder;
  decoder.set_recompute(std::string(argv[3]) == "1" ? Recompute::kBlocks : Recompute::kNone);
  for (auto* parameter : decoder.parameters()) parameter->value.requires_grad_();

  std::vector<std::int64_t> tokens, targets, lengths;
  const auto sequences = nlohmann::json::parse(std::ifstream(argv[4])).get<std::vector<std::vector<std::int64_t>>>();
  for (const auto& sequence : sequences) {
    lengths.push_back(static_cast<std::int64_t>(sequence.size()));
    tokens.insert(tokens.end(), sequence.begin(), sequence.end());
    targets.insert(targets.end(), sequence.begin() + 1, sequence.end());
    targets.push_back(-100);
  }
  const auto pack = make_pack(lengths);
  const auto hidden = decoder.forward(at::tensor(tokens), pack);
  const auto loss = linear_cross_entropy(hidden, decoder.head(), at::tensor(targets)).nll.sum();
  loss.backward();

  const auto logits = at::linear(hidden.detach(), decoder.head().detach()).to(kFloat);
  std::vector<std::pair<std::string, Tensor>> named{{"logits", logits.contiguous()},
                                                    {"loss", loss.detach().to(kFloat).view({1})}};
  for (const auto* parameter : decoder.parameters()) {
    const auto& gradient = parameter->value.grad();
    named.emplace_back(
        "grad." + parameter->name,
        (gradient.defined() ? gradient : at::zeros_like(parameter->value.detach())).to(kFloat).contiguous());
  }
  write_tensors(argv[5], named);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fputs("usage: model_outputs MODEL DTYPE RECOMPUTE SEQUENCES.json OUT.safetensors\n", stderr);
    return 2;
  }
  try {
    sluice::run(argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
