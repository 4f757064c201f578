// SPDX-License-Identifier: Apache-2.0
// dump_batches MODEL DATA SEQ_LEN TOKENS_PER_STEP SEED STEPS: the packs that `sluice sft` trains on, one line of JSON a
// step: a list of packs, each {"sequences": [{"tokens", "targets"}]}.
#include <cstdio>
#include <string>

#include "sluice/core/error.h"
#include "sluice/data/dataset.h"
#include "sluice/data/packing.h"

namespace {

using namespace sluice;

nlohmann::json sequences_of(const PackedBatch& pack) {
  auto sequences = nlohmann::json::array();
  for (std::size_t n = 0; n + 1 < pack.cu_seqlens.size(); ++n) {
    const auto part = [&](const auto& values) {
      return std::vector(values.begin() + pack.cu_seqlens[n], values.begin() + pack.cu_seqlens[n + 1]);
    };
    sequences.push_back({{"tokens", part(pack.tokens)}, {"targets", part(pack.targets)}});
  }
  return sequences;
}

void dump(char** arguments) {
  const std::string model = arguments[1], data = arguments[2];
  const StreamOptions options{.seq_len = std::stoll(arguments[3]),
                              .tokens_per_step = std::stoll(arguments[4]),
                              .seed = std::stoull(arguments[5])};
  const SampleMaker maker(Tokenizer::load(model), ChatTemplate::load(model), {});
  const auto dataset = Dataset::load({data}, maker, {.max_tokens = options.seq_len});
  BatchStream stream(dataset.samples(), options);
  for (auto left = std::stoll(arguments[6]); left > 0; --left) {
    auto packs = nlohmann::json::array();
    for (const auto& pack : stream.next()) packs.push_back({{"sequences", sequences_of(pack)}});
    std::puts(packs.dump().c_str());
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 7) {
    std::fputs("usage: dump_batches MODEL DATA SEQ_LEN TOKENS_PER_STEP SEED STEPS\n", stderr);
    return static_cast<int>(ExitCode::kUsage);
  }
  try {
    dump(arguments);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}
