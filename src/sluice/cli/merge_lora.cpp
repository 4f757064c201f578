// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/merge_lora.h"

#include "sluice/checkpoint/adapter.h"
#include "sluice/checkpoint/export.h"
#include "sluice/checkpoint/load.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/models/family.h"

namespace sluice {

ExitCode run_merge_lora(const MergeLoraOptions& options, const Invocation& invocation) {
  check_new_folder(options.out);
  const ModelFolder folder(options.model.path);
  const auto model = build_model(folder.config(), (options.model.path / kConfigFile).string());
  const auto parameters = model.decoder->parameters();
  const auto map = map_folder(folder, parameters, model.weights);
  load_parameters(folder, parameters, model.weights, lossless_dtype(map, parameters));
  load_adapter(options.adapter, parameters, model.weights, kFloat);
  if (invocation.dry_run) return ExitCode::kDone;
  merge_adapters(parameters);
  export_model(options.out, parameters, folder, model.weights,
               {.max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9)});
  log_info("{} with {} written to {}", options.model.path.string(), options.adapter.string(), options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
