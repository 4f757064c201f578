// SPDX-License-Identifier: Apache-2.0
// For the parity tests: runs a model folder on packed sequences and writes logits and gradients.
//   model_outputs MODEL REQUEST.json OUT.safetensors
// The request: "sequences", a list of token lists; "dtype", float32 (default) or bfloat16; "recompute", a flag;
// "router_aux_loss_coef" and "mtp_loss_scale", weights of losses that are added (0; with the latter the model has its
// multi-token prediction block). OUT holds "logits" [T, V] float32 and, for the loss summed over all sequences' tokens,
// "loss" and "grad.NAME" of each trained tensor by its name and layout in the folder.
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/cli/model_loading.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "sluice/layers/experts.h"

namespace sluice {
namespace {

void write_tensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& named) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : named) infos.push_back(tensor_info(name, tensor));
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, tensor] : named) writer.write(tensor_bytes(tensor));
  writer.commit();
}

// The tokens `ahead` places after each one, -100 where a sequence has none.
Tensor shifted(const std::vector<std::vector<std::int64_t>>& sequences, std::size_t ahead) {
  std::vector<std::int64_t> tokens;
  for (const auto& sequence : sequences) {
    for (std::size_t t = 0; t < sequence.size(); ++t) {
      tokens.push_back(t + ahead < sequence.size() ? sequence[t + ahead] : -100);
    }
  }
  return at::tensor(tokens);
}

void run(char** argv) {
  const auto request = nlohmann::json::parse(std::ifstream(argv[2]));
  const auto sequences = request.at("sequences").get<std::vector<std::vector<std::int64_t>>>();
  const auto mtp_loss_scale = request.value("mtp_loss_scale", 0.0);
  const auto dtype = request.value("dtype", "float32") == "float32" ? Precision::kFloat32 : Precision::kBfloat16;
  auto loaded = load_model(argv[1], DeviceChoice::kCpu, dtype, {.mtp = mtp_loss_scale > 0});
  auto& decoder = *loaded.model.decoder;
  decoder.set_recompute(request.value("recompute", false) ? Recompute::kBlocks : Recompute::kNone);
  const auto parameters = loaded.model.parameters();
  for (auto* parameter : parameters) {
    if (!parameter->frozen) parameter->value.requires_grad_();
  }

  std::vector<std::int64_t> lengths;
  for (const auto& sequence : sequences) lengths.push_back(static_cast<std::int64_t>(sequence.size()));
  const auto pack = make_pack(lengths);
  RouterLoad load;
  const auto hidden = decoder.forward(shifted(sequences, 0), pack, nullptr, &load);
  auto loss = linear_cross_entropy(hidden, decoder.head(), shifted(sequences, 1)).nll.sum();
  if (load.rows > 0) loss = loss + request.value("router_aux_loss_coef", 0.0) * load_balancing_loss(load);
  if (loaded.model.mtp != nullptr) {
    const auto ahead = loaded.model.mtp->forward(decoder, hidden, shifted(sequences, 1).clamp_min(0), pack);
    loss = loss + mtp_loss_scale * linear_cross_entropy(ahead, decoder.head(), shifted(sequences, 2)).nll.sum();
  }
  loss.backward();

  const auto logits = at::linear(hidden.detach(), decoder.head().detach()).to(kFloat);
  std::vector<std::pair<std::string, Tensor>> named{{"logits", logits.contiguous()},
                                                    {"loss", loss.detach().to(kFloat).view({1})}};
  for (const auto& mapped : map_folder(*loaded.folder, parameters, loaded.model.weights)) {
    std::vector<Tensor> runs;
    for (const auto& run : mapped.runs) {
      if (parameters[run.parameter]->frozen) continue;
      const auto& value = parameters[run.parameter]->value;
      const auto gradient = value.grad().defined() ? value.grad() : at::zeros_like(value.detach());
      runs.push_back(gradient.to(kFloat).reshape(-1).narrow(0, run.offset, run.elements));
    }
    if (!runs.empty()) named.emplace_back("grad." + mapped.disk.name, at::cat(runs).view(mapped.disk.shape));
  }
  write_tensors(argv[3], named);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: model_outputs MODEL REQUEST.json OUT.safetensors\n", stderr);
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
