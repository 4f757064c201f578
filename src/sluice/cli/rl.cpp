// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/rl.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "sluice/cli/processes.h"
#include "sluice/cli/training.h"
#include "sluice/core/log.h"
#include "sluice/rl/trainer.h"
#include "sluice/sample/stop.h"
#include "sluice/train/run_folder.h"

namespace sluice {
namespace {

void check(const RlOptions& options) {
  if (options.lora.dropout > 0) {
    fail_usage("lora.dropout must be 0 in rl: the ratio of two policies would be that of two dropouts");
  }
  if (options.rollout.max_tokens >= options.train.seq_len) {
    fail_usage("train.seq_len = {} leaves no place for a prompt before rollout.max_tokens = {} tokens",
               options.train.seq_len, options.rollout.max_tokens);
  }
  if (options.rollout.dynamic_sampling && options.rollout.samples < 2) {
    fail_usage("rollout.dynamic_sampling compares answers; rollout.samples = 1 gives one of each prompt");
  }
  if (options.rollout.strict_replay && !options.rollout.router_replay) {
    fail_usage("rollout.strict_replay is about what rollout.router_replay replays; set that too");
  }
  if (options.objective.dual_clip &&
      algorithm_settings(options.objective).objective.policy == PolicyObjective::kCispo) {
    fail_usage("objective.dual_clip bounds a clipped ratio; objective.algorithm = cispo has none in its gradient");
  }
  if (options.eval.samples > 1 && options.eval.temperature == 0) {
    fail_usage("eval.samples = {} at eval.temperature = 0 would be the same answer each time", options.eval.samples);
  }
  const bool by_environment = std::ranges::any_of(
      options.reward, [](const RewardOptions& reward) { return reward.kind == RewardKind::kEnvironment; });
  if (options.environment.python && !by_environment) {
    fail_usage(
        "environment.python is given, and no [[reward]] has kind = environment, which is what its episodes are worth");
  }
  if (!options.environment.python && by_environment) {
    fail_usage("reward: kind = environment needs environment.python");
  }
  if (options.rollout.samples == 1 && algorithm_settings(options.objective).advantage != Advantage::kGae)
    log_warning("rollout.samples = 1: a group of one has no advantage; nothing is learned");
}

std::string describe(const ObjectiveOptions& options) {
  const auto algorithm = algorithm_settings(options);
  const auto& clip = algorithm.objective.clip;
  const bool gae = algorithm.advantage == Advantage::kGae;
  return fmt::format(
      "objective: ratio kept to [{:.6g}, {:.6g}]{}, KL {}{}", 1 - clip.low, 1 + clip.high,
      clip.dual ? fmt::format(", dual clip {}", *clip.dual) : "",
      options.kl_coef > 0 ? fmt::format("{}{}", options.kl_coef, gae ? " in the rewards" : "") : "off",
      gae ? fmt::format(", a value head with gamma {}, lambda {}", options.gamma, options.gae_lambda) : "");
}

}  // namespace

ExitCode run_rl(const RlOptions& options, const Invocation& invocation) {
  only_one_process("rl");
  check(options);
  check_run_folder(options.run, options.ckpt);
  log_info("sluice {}\n{}", version(), invocation.changed);
  auto loaded = load_model(options.model.path, options.run.device, options.precision.dtype);
  std::optional<TrainedAdapters> adapters;
  if (options.lora.wanted()) adapters = adapt(options.lora, loaded, static_cast<std::uint64_t>(options.seed));
  std::optional<LoadedModel> reference;  // adapters leave the model itself as it was
  if (options.objective.kl_coef > 0 && !adapters) {
    reference = load_model(options.model.path, options.run.device, options.precision.dtype);
  }
  const auto longest = options.train.seq_len - options.rollout.max_tokens;
  const auto prompts = load_prompts(options.data.path, options.model.path, options.data, longest);
  std::vector<Prompt> eval_prompts;
  if (options.eval.data) eval_prompts = load_prompts(*options.eval.data, options.model.path, options.data, longest);
  Rewards rewards(options.reward, options.rollout.max_tokens);
  rewards.check(prompts);
  rewards.check(eval_prompts);
  std::optional<Surroundings> surroundings;
  if (options.environment.python) {
    surroundings = Surroundings{.environment = Environment(options.environment),
                                .glue = TurnGlue(options.model.path, options.data)};
  }
  log_info("model: {} parameters, {} trained; {} threads", count_elements(loaded.model.parameters()),
           count_elements(trained_parameters(loaded.model, MtpTraining::kOff)), at::get_num_threads());
  log_info("{}", describe(options.objective));
  if (invocation.dry_run) return ExitCode::kDone;

  const auto opened =
      open_run(options.run, options.ckpt, {.settings = maths_settings(options), .samples = fingerprint(prompts)},
               invocation.resolved_toml);
  const auto& state = opened.state;
  const auto tokenizer = Tokenizer::load(options.model.path);
  RlTrainer trainer(options, {.model = loaded.model,
                              .reference = reference ? reference->model.decoder.get() : nullptr,
                              .tokenizer = tokenizer,
                              .stop_ids = stop_ids(options.model.path, tokenizer),
                              .prompts = prompts,
                              .eval_prompts = eval_prompts,
                              .rewards = rewards,
                              .surroundings = surroundings ? &*surroundings : nullptr,
                              .state = state,
                              .adapters = adapters});
  if (state) log_info("resuming after step {} of {}", state->step, options.train.steps);
  if (const auto end = trainer.run(); end != ExitCode::kDone) return end;

  export_run(options.run.out, loaded, adapters, MtpTraining::kOff);
  return ExitCode::kDone;
}

}  // namespace sluice
