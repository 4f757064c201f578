// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/plan.h"

#include <fmt/format.h>

#include "sluice/cli/model_source.h"
#include "sluice/cli/processes.h"
#include "sluice/core/error.h"
#include "sluice/core/memory.h"
#include "sluice/formats/model_folder.h"
#include "sluice/layers/lora.h"
#include "sluice/models/family.h"
#include "sluice/train/memory_plan.h"
#include "sluice/train/setup.h"
#include "sluice/train/step_time.h"

namespace sluice {
namespace {

ModelSource source_of(const PlanOptions& options) {
  if (options.folder.empty()) return read_model_source("plan", options.preset, options.config);
  if (!options.preset.empty() || options.config) fail_usage("plan: give a folder, --preset or --config, one of them");
  return {read_model_config(options.folder), (options.folder / kConfigFile).string()};
}

void print_row(std::string_view what, std::int64_t bytes) {
  fmt::print("  {:<44} {:>10.3f} GiB\n", what, static_cast<double>(bytes) / (1 << 30));
}

void print_time(const StepTime& time, const PlannedRun& run) {
  const auto ranks = run.mesh.sizes().ranks();
  fmt::print("a step on {} takes at least, at measured rates\n",
             ranks == 1 ? "an H200" : fmt::format("{} H200s", ranks));
  const auto row = [](std::string_view what, double seconds) { fmt::print("  {:<44} {:>10.4f} s\n", what, seconds); };
  row("products", time.products);
  row("memory", time.memory);
  if (ranks > 1) row("exchanges", time.exchanges);
  if (ranks > 1) row("gradients, beyond the backward pass", time.gradients);
  row("optimizer", time.optimizer);
  row("together", time.together());
  const auto tokens = static_cast<double>(run.rows_of_rank() * run.mesh.sizes().dp * run.seq_len);
  fmt::print("  {:<44} {:>10.0f}\n", "tokens a second and GPU, at most",
             tokens / static_cast<double>(ranks) / time.together());
}

}  // namespace

ExitCode run_plan(const PlanOptions& options, const Invocation&) {
  const auto [config, where] = source_of(options);
  const auto model = build_model(config, where, {.mtp = options.mtp != MtpTraining::kOff});
  if (options.lora_rank) {
    declare_lora(model.parameters(), {.rank = *options.lora_rank, .targets = options.lora_targets});
  }
  const auto sizes = mesh_sizes(options.parallel, options.gpus);
  const Mesh mesh(sizes, /*rank=*/0);
  check_splits(model.parameters(), sizes.tp, sizes.ep);
  const PlannedRun run{.dtype = options.dtype == Precision::kFloat32 ? kFloat : kBFloat16,
                       .seq_len = options.seq_len,
                       .tokens_per_step = options.tokens_per_step,
                       .mtp = options.mtp,
                       .gradients = gradients_kept(options.parallel),
                       .offload = options.offload,
                       .recompute = options.recompute,
                       .mesh = mesh};
  const auto training = plan_training(model, run);
  const auto program = peak_memory_bytes();  // this process has loaded no weight, and all that computes

  fmt::print("training, rows of {} tokens, {} a step", options.seq_len, options.tokens_per_step);
  if (options.gpus > 1) {
    fmt::print("; of each of {} data x {} context x {} tensor ranks, experts over {}", sizes.dp, sizes.cp, sizes.tp,
               sizes.ep);
  }
  fmt::print("\n");
  print_row("parameters", training.parameters);
  print_row("optimizer: masters and moments", training.optimizer);
  print_row("gradients", training.gradients);
  print_row("activations and gradients of a row", training.activations);
  print_row("program and libraries", program);
  print_row("together", training.together() + program);
  print_row("more, while ckpt.interval saves beside a step", training.checkpoint_copy);
  if (training.recorded > 0) print_row("more, on a GPU, where packs are recorded", training.recorded);
  if (training.offloaded > 0) {
    fmt::print("{}\n",
               options.offload == Offload::kHost ? "on a GPU, in the host's memory" : "in a file of the run folder");
    print_row("optimizer: masters and moments", training.offloaded);
  }
  if (options.gpus == 1) {  // sampling runs as one process
    const auto states = plan_states(*model.decoder, options.sequences, options.seq_len);
    fmt::print("sampling, {} at once of up to {} tokens\n", options.sequences, options.seq_len);
    print_row("parameters", training.parameters);
    print_row("caches", states);
    print_row("program and libraries", program);
    print_row("together", training.parameters + states + program);
  }
  if (training.mapped > 0) {
    fmt::print("read from the file by rows, not held\n");
    print_row("n-gram table", training.mapped);
  }
  if (options.dtype == Precision::kBfloat16) print_time(estimate_step(model, run), run);
  return ExitCode::kDone;
}

}  // namespace sluice
