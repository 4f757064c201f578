// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/slice.h"

#include <algorithm>

#include "sluice/checkpoint/export.h"
#include "sluice/checkpoint/load.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

// Lowers the number under `key` to `count`. `path` names config.json in messages.
void lower(ordered_json& text, const char* key, std::int64_t count, const std::filesystem::path& path) {
  const auto all = text.value(key, ordered_json());
  if (!all.is_number_integer() || all.get<std::int64_t>() < count) {
    fail_usage("{}: {} is {}; {} cannot be kept of them", path.string(), key, all.dump(), count);
  }
  text[key] = count;
}

// The config.json of what is kept.
ordered_json sliced_config(const std::filesystem::path& path, const SliceOptions& options) {
  auto config = ordered_json::parse(read_file(path, kMaxConfigBytes));
  auto& text = config.contains("text_config") ? config["text_config"] : config;
  lower(text, "num_hidden_layers", options.layers, path);
  if (auto types = text.find("layer_types"); types != text.end() && types->is_array()) {
    types->erase(types->begin() + std::min<std::int64_t>(options.layers, static_cast<std::int64_t>(types->size())),
                 types->end());
  }
  if (auto layers = text.find("ple_layer_ids"); layers != text.end() && layers->is_array()) {  // counted from 1
    std::erase_if(layers->get_ref<ordered_json::array_t&>(),
                  [&](const ordered_json& layer) { return layer.is_number_integer() && layer > options.layers; });
  }
  if (options.experts) lower(text, "num_experts", *options.experts, path);
  if (options.ngram_vocab_size_base) text["ngram_vocab_size_base"] = *options.ngram_vocab_size_base;
  return config;
}

bool is_of_table(const Parameter& parameter) { return parameter.name.find(".ple.ple_embedding.") != std::string::npos; }

// What of the source is left out, and how the rest is cut.
void cut(WeightRules& rules, const SliceOptions& options, std::int64_t all_layers) {
  for (auto layer = options.layers; layer < all_layers; ++layer) {
    for (const auto* prefix : {"model.layers", "model.language_model.layers"}) {
      rules.aside.push_back({fmt::format("{}.{}.*", prefix, layer), "layers cut off", /*exported=*/false});
    }
  }
  if (options.experts) {
    rules.cropped = {"*.mlp.gate.weight", "*.mlp.experts.*"};
    rules.aside.insert(rules.aside.begin(), {"mtp.*", "multi-token prediction head, which has all experts", false});
  }
  if (options.ngram_vocab_size_base) {
    rules.aside.insert(rules.aside.begin(), {"*.ple.ple_embedding.*", "n-gram tables, drawn anew", false});
  }
}

}  // namespace

ExitCode run_slice(const SliceOptions& options, const Invocation& invocation) {
  check_new_folder(options.out);
  const ModelFolder source(options.folder);
  const auto path = source.path() / kConfigFile;
  const auto config = sliced_config(path, options);
  auto model = build_model(nlohmann::json(config), path.string());
  const auto all = text_config(source.config()).at("num_hidden_layers").get<std::int64_t>();
  cut(model.weights, options, all);
  std::vector<Parameter*> kept, drawn;
  for (auto* parameter : model.parameters()) {
    (options.ngram_vocab_size_base && is_of_table(*parameter) ? drawn : kept).push_back(parameter);
  }
  if (options.ngram_vocab_size_base && drawn.empty()) {
    fail_usage("{}: the first {} layers have no n-gram table; drop ngram_vocab_size_base", path.string(),
               options.layers);
  }
  const auto map = map_folder(source, kept, model.weights);
  if (invocation.dry_run) return ExitCode::kDone;
  const auto dtype = lossless_dtype(map, kept);
  load_parameters(source, kept, model.weights, dtype);
  initialize(drawn, dtype, static_cast<std::uint64_t>(options.seed));
  export_model(options.out, kept, source, model.weights,
               {.max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9),
                .config = config.dump(2) + "\n",
                .fresh = drawn});
  log_info("kept {} of {} layers: {}", options.layers, all, options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
