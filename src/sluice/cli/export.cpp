// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/export.h"

#include <map>

#include "sluice/checkpoint/adapter.h"
#include "sluice/checkpoint/export.h"
#include "sluice/checkpoint/load.h"
#include "sluice/checkpoint/training_checkpoint.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"
#include "sluice/train/setup.h"

namespace sluice {
namespace {

std::filesystem::path find_checkpoint(const std::filesystem::path& given) {
  if (std::filesystem::exists(given / kMetaFile)) return given;
  if (const auto latest = find_latest(given)) return *latest;
  fail_data(
      "{}: neither a checkpoint (no meta.json), nor a run folder with one (no checkpoints/step_N), nor a model folder "
      "(no config.json)",
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

// Each parameter's value out of a checkpoint, whatever layout wrote it. `state` must outlive it.
class Masters {
 public:
  Masters(const TrainingState& state, std::string checkpoint, std::string base)
      : checkpoint_(std::move(checkpoint)), base_(std::move(base)) {
    const auto masters = state.tensors.find("master");
    if (masters == state.tensors.end()) fail_data("{}: holds no master weights", checkpoint_);
    for (const auto& tensor : masters->second) by_name_[tensor.name] = &tensor;
  }

  Tensor at(const std::string& name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) refuse(name, "missing", "it");
    return assemble(*found->second);
  }

  void fill(Parameter& parameter) const {
    const auto value = at(parameter.name);
    if (value.sizes() != at::IntArrayRef(parameter.shape)) {
      refuse(parameter.name, describe(value), shape_text(parameter.shape));
    }
    parameter.value = value;
  }

 private:
  [[noreturn]] void refuse(const std::string& name, const std::string& found, const std::string& wanted) const {
    fail_data("{}: {} is {}, but {} asks for {}; give the base model of this run by --base", checkpoint_, name, found,
              base_, wanted);
  }

  std::string checkpoint_, base_;
  std::map<std::string, const TensorParts*> by_name_;
};

// The adapters that a run trained instead of the model.
LoraSettings take_adapters(const nlohmann::json& adapters, const Masters& masters,
                           const std::vector<Parameter*>& parameters) {
  const auto& scales = adapters.at("scales");
  for (auto* parameter : parameters) {
    const auto module = module_name(*parameter);
    if (!scales.contains(module)) continue;
    set_adapter(*parameter, masters.at(module + ".lora_A.weight"), masters.at(module + ".lora_B.weight"),
                scales.at(module).get<double>());
  }
  return {.rank = adapters.at("rank").get<std::int64_t>(),
          .alpha = adapters.at("alpha").get<double>(),
          .dropout = adapters.at("dropout").get<double>()};
}

ExportOptions export_options(const ExportCommandOptions& options) {
  return {.max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9),
          .fp8 = options.dtype == ExportDtype::kFp8};
}

// All of a folder's model as it lies there.
void load_all(const ModelFolder& folder, const Model& model) {
  const auto parameters = model.parameters();
  const auto map = map_folder(folder, parameters, model.weights);
  load_parameters(folder, parameters, model.weights, lossless_dtype(map, parameters));
}

ExitCode export_folder(const ExportCommandOptions& options, const Invocation& invocation) {
  if (!options.base.empty())
    fail_usage("export: {} is a model folder and needs no --base", options.checkpoint.string());
  const ModelFolder folder(options.checkpoint);
  const auto model = build_model(folder.config(), (folder.path() / kConfigFile).string());
  load_all(folder, model);
  if (invocation.dry_run) return ExitCode::kDone;
  export_model(options.out, model.parameters(), folder, model.weights, export_options(options));
  log_info("exported {} to {}", folder.path().string(), options.out.string());
  return ExitCode::kDone;
}

}  // namespace

ExitCode run_export(const ExportCommandOptions& options, const Invocation& invocation) {
  check_new_folder(options.out);
  if (std::filesystem::exists(options.checkpoint / kConfigFile)) return export_folder(options, invocation);
  const auto checkpoint = find_checkpoint(options.checkpoint);
  const auto state = read_checkpoint(checkpoint);
  const ModelFolder base(options.base.empty() ? base_of(state) : options.base);
  const auto where = (base.path() / kConfigFile).string();
  const auto mtp = mtp_of(state);
  const auto model = build_model(base.config(), where, {.mtp = mtp != MtpTraining::kOff});
  const Masters masters(state, checkpoint.string(), base.path().string());
  const auto adapters = state.meta.value("adapters", nlohmann::json());
  const bool fp8 = options.dtype == ExportDtype::kFp8;
  if (!adapters.is_null()) {
    if (fp8)
      fail_usage("export: {} holds adapters; merge them first, then export the model to FP8", checkpoint.string());
    const auto settings = take_adapters(adapters, masters, model.parameters());
    if (invocation.dry_run) return ExitCode::kDone;
    export_adapter(options.out, model.parameters(), settings, base, model.weights);
  } else {
    const auto trained = trained_parameters(model, mtp);
    if (fp8) load_all(base, model);  // what was not trained becomes FP8 too
    for (auto* parameter : trained) masters.fill(*parameter);
    if (invocation.dry_run) return ExitCode::kDone;
    export_model(options.out, fp8 ? model.parameters() : trained, base, fp8 ? model.weights : export_rules(model, mtp),
                 export_options(options));
  }
  log_info("exported step {} to {}", state.step, options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
