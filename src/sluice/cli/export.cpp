// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/export.h"

#include <map>

#include "sluice/checkpoint/export.h"
#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/core/log.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"
#include "sluice/train/sft.h"

namespace sluice {
namespace {

std::filesystem::path find_checkpoint(const std::filesystem::path& given) {
  if (std::filesystem::exists(given / "meta.json")) return given;
  if (const auto latest = find_latest(given)) return *latest;
  fail_data("{}: neither a checkpoint (no meta.json) nor a run folder with one (no checkpoints/step_N)",
            given.string());
}

std::filesystem::path base_of(const TrainingState& state) {
  const auto settings = state.meta.value("settings", nlohmann::json::object());
  const auto path = settings.value("model.path", nlohmann::json::array());
  if (path.size() != 1 || !path[0].is_string())
    fail_data("the checkpoint does not name its base model; give --base DIR");
  return path[0].get<std::string>();
}

// What the run did with the multi-token prediction block; an older checkpoint does not say, and left it alone.
MtpTraining mtp_of(const TrainingState& state) {
  const auto value = state.meta.value("settings", nlohmann::json::object()).value("train.mtp", nlohmann::json::array());
  if (value == nlohmann::json::array({"joint"})) return MtpTraining::kJoint;
  if (value == nlohmann::json::array({"only"})) return MtpTraining::kOnly;
  return MtpTraining::kOff;
}

}  // namespace

ExitCode run_export(const ExportCommandOptions& options, const Invocation& invocation) {
  const auto checkpoint = find_checkpoint(options.checkpoint);
  const auto state = read_checkpoint(checkpoint);
  const ModelFolder base(options.base.empty() ? base_of(state) : options.base);
  const auto where = (base.path() / kConfigFile).string();
  const auto mtp = mtp_of(state);
  const auto model = build_model(base.config(), where, {.mtp = mtp != MtpTraining::kOff});
  const auto parameters = trained_parameters(model, mtp);

  const auto masters = state.tensors.find("master");
  if (masters == state.tensors.end()) fail_data("{}: holds no master weights", checkpoint.string());
  const std::map<std::string, Tensor> by_name(masters->second.begin(), masters->second.end());
  for (auto* parameter : parameters) {
    const auto found = by_name.find(parameter->name);
    if (found == by_name.end() || found->second.sizes() != at::IntArrayRef(parameter->shape)) {
      fail_data("{}: {} is {}, but {} asks for {}; give the base model of this run by --base", checkpoint.string(),
                parameter->name, found == by_name.end() ? "missing" : describe(found->second), base.path().string(),
                shape_text(parameter->shape));
    }
    parameter->value = found->second;
  }
  if (invocation.dry_run) return ExitCode::kDone;
  export_model(options.out, parameters, base, export_rules(model, mtp),
               {.max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9)});
  log_info("exported step {} to {}", state.step, options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
