// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/init.h"

#include <fmt/format.h>

#include <cstdio>

#include "sluice/checkpoint/export.h"
#include "sluice/cli/model_source.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"

namespace sluice {
namespace {

at::ScalarType dtype_of(const nlohmann::json& config, const std::string& where) {
  const auto& text = text_config(config);
  const auto name = text.value("dtype", text.value("torch_dtype", nlohmann::json("bfloat16")));
  if (name == "bfloat16") return kBFloat16;
  if (name == "float32") return kFloat;
  fail_data("{}.dtype: expected bfloat16 or float32, found {}", where, name.dump());
}

}  // namespace

ExitCode run_init(const InitOptions& options, const Invocation& invocation) {
  if (options.preset == "list") {
    std::puts(preset_names().c_str());
    return ExitCode::kDone;
  }
  if (options.out.empty()) fail_usage("init: --out is missing: the folder to make");
  check_new_folder(options.out);
  if (options.tokenizer && !std::filesystem::exists(*options.tokenizer / "tokenizer.json")) {
    fail_usage("init: --tokenizer {}: no tokenizer.json there; name the folder that holds it",
               options.tokenizer->string());
  }
  const auto [config, where] = read_model_source("init", options.preset, options.config);
  const nlohmann::json plain = config;
  const auto model = build_model(plain, where, {.mtp = options.mtp});
  const auto parameters = model.parameters();
  log_info("init: {} parameters in {} tensors, seed {}", count_elements(parameters), parameters.size(), options.seed);
  if (invocation.dry_run) return ExitCode::kDone;
  const auto dtype = dtype_of(plain, where);
  initialize(parameters, dtype, static_cast<std::uint64_t>(options.seed));
  export_fresh_model(options.out, parameters, config, model.weights, dtype, options.tokenizer);
  log_info("init: wrote {}", options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
