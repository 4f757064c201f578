// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/complete.h"

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

bool has_mtp(const ModelFolder& folder) {
  return std::ranges::any_of(folder.tensors(),
                             [](const auto& tensor) { return tensor.info().name.starts_with("mtp."); });
}

// What the folder sets aside comes out of the base: it must be the same there.
void check_same_aside(const ModelFolder& folder, const std::vector<MappedTensor>& map, const ModelFolder& base) {
  for (std::size_t i = 0; i < map.size(); ++i) {
    if (!map[i].runs.empty() || !map[i].exported) continue;
    const auto& own = folder.tensors()[i];
    const auto found = std::ranges::find(base.tensors(), own.info().name,
                                         [](const auto& tensor) -> const std::string& { return tensor.info().name; });
    if (found == base.tensors().end() || !std::ranges::equal(own.bytes(), found->bytes())) {
      fail_data("{}: {} is not the same tensor in {}; complete a folder from the base that it came from",
                folder.path().string(), own.info().name, base.path().string());
    }
  }
}

}  // namespace

ExitCode run_complete(const CompleteOptions& options, const Invocation& invocation) {
  check_new_folder(options.out);
  const ModelFolder folder(options.folder), base(options.base);
  const BuildOptions build{.mtp = has_mtp(folder)};
  const auto own = build_model(folder.config(), (folder.path() / kConfigFile).string(), build);
  const auto whole = build_model(base.config(), (base.path() / kConfigFile).string(), build);
  const auto own_parameters = own.parameters(), parameters = whole.parameters();
  const auto map = map_folder(folder, own_parameters, own.weights);
  check_same_aside(folder, map, base);
  map_folder(base, parameters, whole.weights);
  for (std::size_t i = 0; i < std::max(own_parameters.size(), parameters.size()); ++i) {
    const auto name = [&](const auto& list) { return i < list.size() ? list[i]->name : "nothing"; };
    if (name(own_parameters) != name(parameters) || own_parameters[i]->shape != parameters[i]->shape) {
      fail_data("{} and {} are not the same model: {} {} in the one, {} {} in the other", folder.path().string(),
                base.path().string(), name(own_parameters),
                i < own_parameters.size() ? shape_text(own_parameters[i]->shape) : "", name(parameters),
                i < parameters.size() ? shape_text(parameters[i]->shape) : "");
    }
  }
  if (invocation.dry_run) return ExitCode::kDone;
  load_parameters(folder, own_parameters, own.weights, lossless_dtype(map, own_parameters));
  export_model(options.out, own_parameters, base, whole.weights,
               {.max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9)});
  log_info("completed {} from {}: {}", folder.path().string(), base.path().string(), options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
