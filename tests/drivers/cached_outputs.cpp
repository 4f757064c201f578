// SPDX-License-Identifier: Apache-2.0
// For the parity tests: runs a model folder on sequences through its cache, in pieces, and writes their logits.
//   cached_outputs MODEL float32|bfloat16 PIECES.json SEQUENCES.json OUT.safetensors
// SEQUENCES.json holds a list of token lists; each has a slot of its own, and all advance together. PIECES.json is a
// list of how many tokens they take in each call; the last number goes on to the end. OUT holds "logits" [T, V] float32
// in the order of the sequences.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/cli/model_loading.h"

namespace sluice {
namespace {

template <typename Value>
Value read_json(const char* path) {
  return nlohmann::json::parse(std::ifstream(path)).get<Value>();
}

Tensor run(const Decoder& decoder, const std::vector<std::int64_t>& pieces,
           const std::vector<std::vector<std::int64_t>>& sequences) {
  const at::NoGradGuard no_grad;
  std::size_t longest = 0;
  for (const auto& sequence : sequences) longest = std::max(longest, sequence.size());
  const auto count = static_cast<std::int64_t>(sequences.size());
  auto state = decoder.new_state(count, static_cast<std::int64_t>(longest));
  state.clear(at::arange(count));
  std::vector<std::vector<Tensor>> logits(sequences.size());
  std::size_t done = 0;
  for (std::size_t call = 0; done < longest; ++call) {
    const auto most = static_cast<std::size_t>(pieces[std::min(call, pieces.size() - 1)]);
    std::vector<std::int64_t> lengths, past, slots, tokens;
    for (std::size_t n = 0; n < sequences.size(); ++n) {
      const auto end = std::min(done + most, sequences[n].size());
      if (end <= done) continue;
      lengths.push_back(static_cast<std::int64_t>(end - done));
      past.push_back(static_cast<std::int64_t>(done));
      slots.push_back(static_cast<std::int64_t>(n));
      tokens.insert(tokens.end(), sequences[n].begin() + done, sequences[n].begin() + end);
    }
    const auto hidden = decoder.forward(at::tensor(tokens), make_pack(lengths, past, slots), &state);
    const auto parts = at::linear(hidden, decoder.head()).to(kFloat).split_with_sizes(lengths);
    for (std::size_t i = 0; i < slots.size(); ++i) logits[slots[i]].push_back(parts[i]);
    done += most;
  }
  std::vector<Tensor> all;
  for (const auto& parts : logits) all.push_back(at::cat(parts));
  return at::cat(all);
}

void write_logits(const char* path, const Tensor& logits) {
  const std::vector<TensorInfo> infos{tensor_info("logits", logits)};
  SafetensorsWriter writer(path, infos);
  writer.write(tensor_bytes(logits));
  writer.commit();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  using namespace sluice;
  if (argc != 6) {
    std::fputs("usage: cached_outputs MODEL DTYPE PIECES.json SEQUENCES.json OUT.safetensors\n", stderr);
    return 2;
  }
  try {
    const auto loaded = load_model(argv[1], DeviceChoice::kCpu,
                                   std::string(argv[2]) == "float32" ? Precision::kFloat32 : Precision::kBfloat16);
    write_logits(argv[5], run(*loaded.model.decoder, read_json<std::vector<std::int64_t>>(argv[3]),
                              read_json<std::vector<std::vector<std::int64_t>>>(argv[4])));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
