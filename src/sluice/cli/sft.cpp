// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/sft.h"

#include <ATen/Parallel.h>

#include "sluice/cli/processes.h"
#include "sluice/cli/training.h"
#include "sluice/core/log.h"
#include "sluice/parallel/collectives.h"
#include "sluice/train/flops.h"
#include "sluice/train/run_folder.h"
#include "sluice/train/sft.h"
#include "sluice/train/sft_data.h"

namespace sluice {
namespace {

ExitCode train(const SftOptions& options, const Invocation& invocation, LoadedModel& loaded, const Mesh& mesh) {
  if (mesh.world().rank() == 0) check_run_folder(options.run, options.ckpt);
  barrier(mesh.world());  // before the others read anything
  const auto parameters = loaded.model.parameters();
  check_splits(parameters, mesh.tp().size(), mesh.ep().size());
  load_values(loaded, std::nullopt, place_of(mesh));
  loaded.model.decoder->set_mesh(mesh);
  const auto seed = static_cast<std::uint64_t>(options.seed);
  std::optional<TrainedAdapters> adapters;
  if (options.lora.wanted()) adapters = adapt(options.lora, loaded, seed, mesh);
  const auto trained = trained_parameters(loaded.model, options.train.mtp);
  const auto data = load_sft_data(options, loaded.model.decoder->vocab_size());
  const auto count = count_elements(parameters), trained_count = count_elements(trained);
  log_info("model: {} parameters, {} trained; {} threads", count,
           trained_count == count ? "all" : fmt::format("{}", trained_count), at::get_num_threads());
  if (invocation.dry_run) return ExitCode::kDone;

  const auto opened =
      open_run(options.run, options.ckpt, {.settings = maths_settings(options), .samples = fingerprint(data.train)},
               invocation.resolved_toml, mesh);
  const auto& state = opened.state;
  const auto peak = peak_operations_per_s(loaded.device.name, loaded.dtype);
  SftTrainer trainer(options, loaded.model, data.train, data.eval, state, peak, adapters);
  if (state) log_info("resuming after step {} of {}", state->step, trainer.total_steps());
  if (const auto end = trainer.run(); end != ExitCode::kDone) return end;

  export_run(options.run.out, loaded, adapters, options.train.mtp, mesh);
  return ExitCode::kDone;
}

}  // namespace

ExitCode run_sft(const SftOptions& options, const Invocation& invocation) {
  const auto launch = join_launch();
  log_info("sluice {}\n{}", version(), invocation.changed);
  auto loaded = open_model(options.model.path, options.run.device, options.precision.dtype,
                           {.mtp = options.train.mtp != MtpTraining::kOff}, launch.local_rank);
  return run_on_mesh(launch, options.parallel, loaded.device.device, invocation.resolved_toml,
                     [&](const Mesh& mesh) { return train(options, invocation, loaded, mesh); });
}

}  // namespace sluice
