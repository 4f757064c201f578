// SPDX-License-Identifier: Apache-2.0
// Any text is a model's config or index, or a data error; any names of tensors give a map or a data error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

#include "sluice/core/error.h"
#include "sluice/formats/json.h"
#include "sluice/formats/model_folder.h"
#include "sluice/formats/weight_map.h"

namespace {

using namespace sluice;

const WeightRules kRules{
    .prefixes = {{"model.language_model.", "model."}},
    .aside = {{"model.visual.*", "vision tower"}, {"*mtp*.", "MTP block"}},
    .pieces = {{"experts.gate_up_proj", {"experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"}},
               {"ngram.weight", {"ngram.shard_{}.weight"}, false}}};
const std::vector<WantedTensor> kWanted = {
    {"model.norm.weight", {2}}, {"model.experts.gate_up_proj", {2, 4, 2}}, {"model.ngram.weight", {8, 2}}};

template <typename Action>
void data_error_or_done(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  data_error_or_done([&] { text_config(parse_json(text, "fuzz")); });
  data_error_or_done([&] {
    std::vector<TensorInfo> disk;
    for (const auto& [name, shard] : parse_index(text, "fuzz")) {
      if (std::filesystem::path(shard).has_parent_path()) std::abort();  // reaches outside its folder
      disk.push_back({name, Dtype::kBF16, {static_cast<std::int64_t>(shard.size() % 9), 2}});
    }
    for (const auto& mapped : map_weights("fuzz", disk, kWanted, kRules)) {
      for (const auto& run : mapped.runs) {
        std::int64_t elements = 1;
        for (const auto dim : kWanted[run.parameter].shape) elements *= dim;
        if (run.offset < 0 || run.offset + run.elements > elements) std::abort();
      }
    }
  });
  return 0;
}
