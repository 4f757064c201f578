// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/sft.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "sluice/cli/processes.h"
#include "sluice/cli/training.h"
#include "sluice/core/log.h"
#include "sluice/parallel/collectives.h"
#include "sluice/train/flops.h"
#include "sluice/train/run_folder.h"
#include "sluice/train/sft.h"

namespace sluice {
namespace {

struct SftData {
  std::vector<Sample> train, eval;
};

std::vector<Sample> load_samples(const std::filesystem::path& file, const SampleMaker& maker, const DataOptions& data) {
  return Dataset::load({file}, maker, {.max_tokens = data.seq_len, .over_long = data.over_long}).samples();
}

// Moves a part of the samples, chosen by the seed alone, from train to eval.
void split_off(SftData& data, double part, std::uint64_t seed) {
  const auto count = static_cast<std::int64_t>(data.train.size());
  const auto kept_back =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(part * static_cast<double>(count)), 1, count - 1);
  const auto order = shuffled(count, seed, /*epoch=*/std::uint64_t{0} - 1);  // an epoch that no training reaches
  SftData divided;
  for (std::int64_t i = 0; i < count; ++i) {
    (i < kept_back ? divided.eval : divided.train).push_back(std::move(data.train[static_cast<std::size_t>(order[i])]));
  }
  data = std::move(divided);
}

SftData load_data(const SftOptions& options) {
  const auto tokenizer = Tokenizer::load(options.model.path);
  const SampleMaker maker(tokenizer, ChatTemplate::load(options.model.path, options.data.chat_template),
                          {.loss_on = options.data.loss_on,
                           .special = options.data.control_tokens ? SpecialTokens::kControl : SpecialTokens::kLiteral,
                           .enable_thinking = {}});
  SftData data{.train = load_samples(options.data.path, maker, options.data), .eval = {}};
  if (options.eval.data) {
    data.eval = load_samples(*options.eval.data, maker, options.data);
  } else if (options.eval.split > 0) {
    if (data.train.size() < 2) fail_data("{}: one sample cannot be split; drop eval.split", options.data.path.string());
    split_off(data, options.eval.split, static_cast<std::uint64_t>(options.seed));
  }
  return data;
}

void check_ids(const std::vector<Sample>& samples, std::int64_t vocab_size) {
  for (const auto& sample : samples) {
    for (std::size_t i = 0; i < sample.tokens.size(); ++i) {
      if (sample.tokens[i] < 0 || sample.tokens[i] >= vocab_size) {
        fail_data("{}: token {} is {}, outside the model's vocabulary of {}", sample.place, i, sample.tokens[i],
                  vocab_size);
      }
    }
  }
}

// The state to go on from, on every rank. Rank 0 opens the run's folder, and tells the others which checkpoint it took.
std::optional<TrainingState> open_run_together(const SftOptions& options, const SftData& data,
                                               const std::string& resolved_toml, const Mesh& mesh) {
  constexpr std::int64_t kNone = -1;
  std::optional<TrainingState> state;
  if (mesh.world().rank() == 0) {
    state = open_run(options.run, options.ckpt,
                     {.settings = maths_settings(options), .samples = fingerprint(data.train)}, resolved_toml);
  }
  const auto step = all_gather_numbers({state ? state->step : kNone}, mesh.world())[0][0];
  if (mesh.world().rank() != 0 && step != kNone) state = read_checked_checkpoint(options.run.out, step);
  return state;
}

// What needs the values of a whole row, or of a whole parameter, beside each other.
void check_lora(const LoraOptions& lora, const Mesh& mesh) {
  if (lora.dropout > 0 && mesh.sequence().size() > 1) {
    fail_usage("lora.dropout needs whole rows: give parallel.tp = 1 and parallel.cp = 1, or lora.dropout = 0");
  }
}

ExitCode train(const SftOptions& options, const Invocation& invocation, LoadedModel& loaded, const Mesh& mesh) {
  if (mesh.world().rank() == 0) check_run_folder(options.run, options.ckpt);
  barrier(mesh.world());  // before the others read anything
  const auto parameters = loaded.model.parameters();
  check_splits(parameters, mesh.tp().size(), mesh.ep().size());
  if (options.lora.wanted()) check_lora(options.lora, mesh);
  load_values(loaded, std::nullopt, place_of(mesh));
  loaded.model.decoder->set_mesh(mesh);
  const auto seed = static_cast<std::uint64_t>(options.seed);
  std::optional<TrainedAdapters> adapters;
  if (options.lora.wanted()) adapters = adapt(options.lora, loaded, seed, mesh);
  const auto trained = trained_parameters(loaded.model, options.train.mtp);
  const auto vocab_size = loaded.model.decoder->vocab_size();
  const auto data = load_data(options);
  check_ids(data.train, vocab_size);
  check_ids(data.eval, vocab_size);
  const auto count = count_elements(parameters), trained_count = count_elements(trained);
  log_info("model: {} parameters, {} trained; {} threads", count,
           trained_count == count ? "all" : fmt::format("{}", trained_count), at::get_num_threads());
  if (invocation.dry_run) return ExitCode::kDone;

  const auto state = open_run_together(options, data, invocation.resolved_toml, mesh);
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
